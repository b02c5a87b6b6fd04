-- Add a note to the reason of an ended task. Invariant: a repeated call adds nothing, and the time of the end stays.
local id = args.id
if not redis.call('ZSCORE', ENDED, id) then return {'unfinished'} end
local reason = get(id, 'reason')
if not (reason and string.find(reason, args.note, 1, true)) then
  set(id, 'reason', reason and reason .. '; ' .. args.note or args.note)
end
return {'noted'}
