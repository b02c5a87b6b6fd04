-- Extend a lease and record the given fields. Invariant: only the holder of the lease changes the task.
ensure_group()
if not holds_lease() then return {'lost'} end
redis.call('XCLAIM', STREAM, GROUP, args.consumer, 0, args.entry, 'JUSTID')
if #ARGV > 1 then set(args.id, 'updated', args.now, unpack(ARGV, 2)) end
return {'held', get(args.id, 'cancel_requested') and 1 or 0}
