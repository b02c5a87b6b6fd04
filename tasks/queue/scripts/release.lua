-- End a lease: finish the task, or requeue it at the head of the stream. Invariant: a lease ends once, by its holder;
-- the repeated call returns the same record.
local id, outcome = args.id, args.outcome
ensure_group()
local release = args.claim .. ' ' .. outcome
if not holds_lease() then
  return get(id, 'released') == release and {'released', record(id)} or {'lost'}
end
if #ARGV > 1 then set(id, unpack(ARGV, 2)) end
local requeue = outcome == 'hand back' or outcome == 'retry'
if outcome == 'hand back' then set(id, 'uncounted', 1) end
if requeue then uncount(id) end
if requeue and get(id, 'cancel_requested') then
  finish(id, 'cancelled', CANCELLED)
elseif outcome == 'retry' and tonumber(get(id, 'attempts')) >= args.max_attempts then
  finish(id, 'failed', 'given up after ' .. get(id, 'attempts') .. ' attempts: ' .. args.reason)
elseif requeue then
  -- A delivered entry cannot become undelivered: give it to a consumer that is no worker, with an expired lease.
  redis.call('XCLAIM', STREAM, GROUP, UNHELD, 0, args.entry, 'TIME', 0, 'JUSTID')
  unset(id, 'progress')
  set(id, 'state', 'queued', 'updated', args.now)
  if outcome == 'retry' then set(id, 'reason', args.reason) end
else
  finish(id, outcome, args.reason)
end
remove_idle_consumer(args.consumer)
if redis.call('EXISTS', key(id)) == 1 then set(id, 'released', release) end
return {'released', record(id)}
