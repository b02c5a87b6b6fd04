-- Record the version that answers with the classes of a task before it is learned. Invariant: an ended task does not
-- change.
local id = args.id
local submission = get(id, 'submission')
if not submission or redis.call('ZSCORE', ENDED, id) then return {'ended'} end
if args.submission and args.submission ~= submission then return {'ended'} end
set(id, 'provisional', args.version, 'updated', args.now)
return {'recorded'}
