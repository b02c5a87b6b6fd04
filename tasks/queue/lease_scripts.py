"""The steps of a lease inside Redis: claim, renew, end. The keys and what is common are in `queue_scripts`."""

from tasks.queue.queue_scripts import COMMON

# The first arguments of every script about a lease: who claims to hold what.
_HELD = """
local id, entry, consumer, delivery, claim = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
need_group()
local held = holder(entry)
local owned = held and held[2] == consumer and held[4] == delivery and get(id, 'claim') == claim
"""

# One task at a time, in order: while the first one is held by somebody alive there is nothing to hand out.
CLAIM = (
    COMMON
    + """
local consumer, claim, now = ARGV[1], ARGV[2], ARGV[3]
local lease, max_attempts, history = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
need_group()
local function nothing()
  local last = redis.call('XREVRANGE', STREAM, '+', '-', 'COUNT', 1)[1]
  return {'wait', last and last[1] or '0-0'}
end
local function task_of(entry)
  local found = redis.call('XRANGE', STREAM, entry, entry)[1]
  local id = found and found[2][2]
  return id and get(id, 'entry') == entry and id
end
while true do
  local first = redis.call('XPENDING', STREAM, GROUP, '-', '+', 1)[1]
  local entry = first and first[1]
  if first and first[3] < lease then
    local id = task_of(entry)
    if id and get(id, 'claim') == claim then return {'lease', entry, first[4], record(id)} end
    if id then return nothing() end
  elseif first then
    redis.call('XAUTOCLAIM', STREAM, GROUP, consumer, lease, entry, 'COUNT', 1)
    dismiss(first[2])
  elseif redis.call('XLEN', STREAM) == 0 then
    return nothing()
  else
    local read = redis.call('XREADGROUP', 'GROUP', GROUP, consumer, 'COUNT', 1, 'STREAMS', STREAM, '>')
    if not read then return nothing() end
    entry = read[1][2][1][1]
  end
  local id = task_of(entry)
  if not id then
    leave_stream(entry)  -- somebody removed the task by hand
  elseif get(id, 'cancel') then
    finish(id, 'cancelled', 'cancelled while it was being learned', now, history)
  elseif tonumber(get(id, 'attempts')) >= max_attempts then
    local last = get(id, 'reason')
    finish(id, 'failed', 'given up after ' .. get(id, 'attempts') .. ' attempts: the worker stopped without a word, '
      .. 'killed or out of memory' .. (last and '; before that: ' .. last or ''), now, history)
  else
    redis.call('HINCRBY', key(id), 'attempts', 1)
    redis.call('HDEL', key(id), 'ended_by')
    redis.call('HSET', key(id), 'state', 'learning', 'updated', now, 'claim', claim)
    return {'lease', entry, holder(entry)[4], record(id)}
  end
end
"""
)

# Renews the lease; with more fields (state, progress) it also records them.
RENEW = (
    COMMON
    + _HELD
    + """
if not owned then return {'lost'} end
redis.call('XCLAIM', STREAM, GROUP, consumer, 0, entry, 'JUSTID')
local fields = {}
for i = 6, #ARGV do fields[#fields + 1] = ARGV[i] end
if #fields > 0 then redis.call('HSET', key(id), unpack(fields)) end
return {'held', get(id, 'cancel') and 1 or 0}
"""
)

# Ends a lease: with the task, or by putting the task back to where it was, at the head.
END = (
    COMMON
    + _HELD
    + """
local how, reason, now = ARGV[6], ARGV[7], ARGV[8]
local max_attempts, history = tonumber(ARGV[9]), tonumber(ARGV[10])
local mark = claim .. ' ' .. how
if not owned then
  return get(id, 'ended_by') == mark and {'ended', record(id)} or {'lost'}
end
for i = 11, #ARGV, 2 do redis.call('HSET', key(id), ARGV[i], ARGV[i + 1]) end
local back = how == 'hand back' or how == 'try again'
if back and get(id, 'cancel') then
  finish(id, 'cancelled', 'cancelled while it was being learned', now, history)
elseif how == 'try again' and tonumber(get(id, 'attempts')) >= max_attempts then
  finish(id, 'failed', 'given up after ' .. get(id, 'attempts') .. ' attempts: ' .. reason, now, history)
elseif back then
  redis.call('XCLAIM', STREAM, GROUP, NOBODY, 0, entry, 'TIME', 0, 'JUSTID')
  redis.call('HDEL', key(id), 'progress')
  redis.call('HSET', key(id), 'state', 'queued', 'updated', now)
  if how == 'hand back' then
    redis.call('HINCRBY', key(id), 'attempts', -1)
  else
    redis.call('HSET', key(id), 'reason', reason)
  end
else
  finish(id, how, reason, now, history)
end
dismiss(consumer)
if redis.call('EXISTS', key(id)) == 1 then redis.call('HSET', key(id), 'ended_by', mark) end
return {'ended', record(id)}
"""
)
