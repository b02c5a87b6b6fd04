-- Accept a task. Invariant: a batch has at most one task, and an idempotency key names at most one batch.
local id, batch = args.id, args.batch_sha256
ensure_group()
local used = args.idempotency and prefix .. ':idempotency:' .. args.idempotency
local function remember_key()
  if used then redis.call('SET', used, id .. ' ' .. batch, 'EX', args.idempotency_seconds) end
end
local function existing()
  return {get(id, 'submission') == args.submission and 'queued' or 'existing', record(id)}
end

if used then
  local first = redis.call('GET', used)
  if first and first ~= id .. ' ' .. batch then return {'conflict', first} end
  if first and redis.call('EXISTS', key(id)) == 1 then return existing() end
end
local state = get(id, 'state')
if state and not can_retry(state) then
  unset(id, 'cancel_requested')  -- a new submission withdraws the cancellation
  remember_key()
  return existing()
end
if is_full() then return {'full'} end
set(id, unpack(ARGV, 2))
enqueue(id)
redis.call('ZADD', INDEX, next_number(), id)
remember_key()
return {'queued', record(id)}
