-- Extend a lease and record the given fields. Invariant: only the holder of the lease changes the task. The attempt
-- does not count if the worker is stopping, or if its checkpoint is further than that of all attempts before.
ensure_group()
if not holds_lease() then return {'lost'} end
redis.call('XCLAIM', STREAM, GROUP, args.consumer, 0, args.entry, 'JUSTID')
local advanced = args.checkpoint and args.checkpoint > tonumber(get(args.id, 'checkpoint') or 0)
if advanced then set(args.id, 'checkpoint', args.checkpoint) end
if advanced or args.uncounted then set(args.id, 'uncounted', 1) end
if #ARGV > 1 then set(args.id, 'updated', args.now, unpack(ARGV, 2)) end
return {'held', get(args.id, 'cancel_requested') and 1 or 0}
