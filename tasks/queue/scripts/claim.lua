-- Lease the first unfinished task. Invariant: at most one task is leased, and it is the first of the stream. A task
-- whose lease expired is leased again, unless it was cancelled or has used all its attempts that count.
ensure_group()
local function none()
  local last = redis.call('XREVRANGE', STREAM, '+', '-', 'COUNT', 1)[1]
  return {'none', last and last[1] or '0-0'}
end
local function task_of(entry)
  local found = redis.call('XRANGE', STREAM, entry, entry)[1]
  local id = found and found[2][2]
  return id and get(id, 'entry') == entry and id
end

local function field(reply, name)
  for i = 1, #reply, 2 do if reply[i] == name then return reply[i + 1] end end
end
-- Whether the first delivered entry has a time in the future: the clock was set back. XPENDING shows 0 for it.
local function is_from_the_future()
  local time = redis.call('TIME')
  for _, group in ipairs(field(redis.call('XINFO', 'STREAM', STREAM, 'FULL', 'COUNT', 1), 'groups')) do
    if field(group, 'name') == GROUP then return field(group, 'pending')[1][3] > time[1] * 1000 + time[2] / 1000 end
  end
end

while true do
  local first = pending()
  local entry = first and first[1]
  if first and first[3] == 0 and is_from_the_future() then
    redis.call('XCLAIM', STREAM, GROUP, first[2], 0, entry, 'JUSTID')  -- the lease begins now, or it would not expire
  end
  if first and first[3] < args.lease_ms then
    local id = task_of(entry)
    if id and get(id, 'claim') == args.claim then return {'lease', entry, first[4], record(id)} end  -- repeated call
    if id then return none() end
  elseif first then
    redis.call('XAUTOCLAIM', STREAM, GROUP, args.consumer, args.lease_ms, entry, 'COUNT', 1)
    remove_idle_consumer(first[2])
  elseif redis.call('XLEN', STREAM) == 0 then
    return none()
  else
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, args.consumer, 'COUNT', 1, 'STREAMS', STREAM, '>')
    if not read then return none() end
    entry = read[1][2][1][1]
  end
  local id = task_of(entry)
  if id then uncount(id) end
  if not id then
    remove_entry(entry)  -- the record was deleted by hand
  elseif get(id, 'cancel_requested') then
    finish(id, 'cancelled', CANCELLED)
  elseif tonumber(get(id, 'attempts')) >= args.max_attempts then
    local last = get(id, 'reason')
    finish(id, 'failed', 'given up after ' .. get(id, 'attempts') .. ' attempts: the worker stopped without a report, '
      .. 'killed or out of memory' .. (last and '; before that: ' .. last or ''))
  else
    redis.call('HINCRBY', key(id), 'attempts', 1)
    unset(id, 'released')
    set(id, 'state', 'learning', 'updated', args.now, 'claim', args.claim)
    return {'lease', entry, pending(entry)[4], record(id)}
  end
end
