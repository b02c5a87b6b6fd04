"""What the queue does inside Redis: one Lua script a step, because a step must happen as a whole or not at all.

    <prefix>:tasks              the stream of unfinished tasks, an entry {task: id}; read by the group `trainers`
    <prefix>:task:<id>          a hash a task: its record, and who holds it (`entry`, `claim`)
    <prefix>:index              every task that is kept, by the order of submission
    <prefix>:ended              those that ended, by the order of ending: the oldest are forgotten
    <prefix>:idempotency:<hash> the task and batch that an idempotency key was used for; expires
    <prefix>:sequence           the counter behind both orders

Every script may be sent twice: the client cannot know whether a broken connection lost its request or only the answer.
A step therefore carries a random name (`submission`, `claim`) and recognises itself.

Keys of tasks are made from what the stream says, so a Redis Cluster needs a prefix with a hash tag: `{openworld}`.
Commands of Redis 6.2 only. Lua sees RESP2, whatever the client speaks.
"""

GROUP = "trainers"
NOBODY = "-"  # the consumer of an entry that was handed back: an entry cannot become undelivered

COMMON = f"""
local prefix = KEYS[1]
local STREAM, INDEX, ENDED = prefix .. ':tasks', prefix .. ':index', prefix .. ':ended'
local GROUP, NOBODY = '{GROUP}', '{NOBODY}'
local function key(id) return prefix .. ':task:' .. id end
local function get(id, field) return redis.call('HGET', key(id), field) end
local function record(id) return redis.call('HGETALL', key(id)) end
local function number() return redis.call('INCR', prefix .. ':sequence') end
local function holder(entry) return redis.call('XPENDING', STREAM, GROUP, entry, entry, 1)[1] end

-- Made when first needed, and again if it was destroyed: it starts from 0, so nothing in the stream is passed over.
local function need_group()
  local groups = redis.pcall('XINFO', 'GROUPS', STREAM)
  for _, group in ipairs(groups.err and {{}} or groups) do
    if group[2] == GROUP then return end
  end
  redis.call('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM')
end

-- A worker that holds nothing leaves the group, or every worker there ever was would stay in it.
local function dismiss(consumer)
  if #redis.call('XPENDING', STREAM, GROUP, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', STREAM, GROUP, consumer)
  end
end

local function leave_stream(entry)
  redis.call('XACK', STREAM, GROUP, entry)
  redis.call('XDEL', STREAM, entry)
end

local function finish(id, state, reason, now, history)
  local entry = get(id, 'entry')
  if entry then leave_stream(entry) end
  redis.call('HDEL', key(id), 'entry', 'cancel')
  redis.call('HSET', key(id), 'state', state, 'updated', now)
  if reason ~= '' then
    redis.call('HSET', key(id), 'reason', reason)
  else
    redis.call('HDEL', key(id), 'reason')
  end
  redis.call('ZADD', ENDED, number(), id)
  for _, old in ipairs(redis.call('ZRANGE', ENDED, 0, -1 - history)) do
    redis.call('DEL', key(old))
    redis.call('ZREM', ENDED, old)
    redis.call('ZREM', INDEX, old)
  end
end

-- Those that nobody works on: all unfinished ones but for the one that is held.
local function full(max_waiting)
  local held = redis.call('XPENDING', STREAM, GROUP, '-', '+', 1)[1]
  local working = (held and held[2] ~= NOBODY) and 1 or 0
  return redis.call('XLEN', STREAM) - working >= max_waiting
end

local function enqueue(id, now)
  redis.call('HDEL', key(id), 'progress', 'version', 'reason', 'result', 'cancel', 'claim', 'ended_by')
  redis.call('HSET', key(id), 'state', 'queued', 'updated', now, 'attempts', 0,
    'entry', redis.call('XADD', STREAM, '*', 'task', id))
  redis.call('ZREM', ENDED, id)
end
"""

SUBMIT = (
    COMMON
    + """
local id, batch, submission, now = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local max_waiting, idempotency, seconds = tonumber(ARGV[5]), ARGV[6], ARGV[7]
need_group()
local used = idempotency ~= '' and prefix .. ':idempotency:' .. idempotency
local function remember()
  if used then redis.call('SET', used, id .. ' ' .. batch, 'EX', seconds) end
end
local function known()
  return {get(id, 'submission') == submission and 'fresh' or 'known', record(id)}
end
if used then
  local first = redis.call('GET', used)
  if first and first ~= id .. ' ' .. batch then return {'conflict', first} end
  if first and redis.call('EXISTS', key(id)) == 1 then return known() end
end
local state = get(id, 'state')
if state and state ~= 'rejected' and state ~= 'failed' and state ~= 'cancelled' then
  redis.call('HDEL', key(id), 'cancel')  -- who submits it wants it learned
  remember()
  return known()
end
if full(max_waiting) then return {'full'} end
local fields = {}
for i = 8, #ARGV do fields[#fields + 1] = ARGV[i] end
redis.call('HSET', key(id), 'submission', submission, unpack(fields))
enqueue(id, now)
redis.call('ZADD', INDEX, number(), id)
remember()
return {'fresh', record(id)}
"""
)

CANCEL = (
    COMMON
    + """
local id, now, history = ARGV[1], ARGV[2], tonumber(ARGV[3])
need_group()
local state = get(id, 'state')
if not state then return {'unknown'} end
if state == 'queued' then
  finish(id, 'cancelled', 'cancelled before it was learned', now, history)
elseif state == 'learning' or state == 'evaluating' then
  redis.call('HSET', key(id), 'cancel', 1, 'updated', now)
elseif state ~= 'cancelled' then
  return {'ended', record(id)}
end
return {'cancelled', record(id)}
"""
)

RETRY = (
    COMMON
    + """
local id, now, max_waiting = ARGV[1], ARGV[2], tonumber(ARGV[3])
need_group()
local state = get(id, 'state')
if not state then return {'unknown'} end
if state == 'published' then return {'published', record(id)} end
if state == 'rejected' or state == 'failed' or state == 'cancelled' then
  if full(max_waiting) then return {'full'} end
  enqueue(id, now)
end
redis.call('HDEL', key(id), 'cancel')  -- still being learned: then it goes on
return {'queued', record(id)}
"""
)

# Newest first, those before a task, in some states; a row has the fields that are named.
LIST = (
    COMMON
    + """
local limit, before, states, asked = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])
local highest = '+inf'
if before ~= '' then
  local score = redis.call('ZSCORE', INDEX, before)
  if not score then return {'unknown'} end
  highest = '(' .. score
end
local fields, rows = {}, {'rows'}
for i = 5, 4 + asked do fields[#fields + 1] = ARGV[i] end
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', INDEX, highest, '-inf')) do
  if #rows > limit then break end
  local state = get(id, 'state')
  if state and string.find(states, ' ' .. state .. ' ', 1, true) then
    rows[#rows + 1] = redis.call('HMGET', key(id), unpack(fields))
  end
end
return rows
"""
)

COUNTS = (
    COMMON
    + """
local counts, flat = {}, {}
for _, id in ipairs(redis.call('ZRANGE', INDEX, 0, -1)) do
  local state = get(id, 'state')
  if state then counts[state] = (counts[state] or 0) + 1 end
end
for state, n in pairs(counts) do
  flat[#flat + 1] = state
  flat[#flat + 1] = n
end
return flat
"""
)

# Milliseconds since the first unfinished task was queued; by the server's clock, which also made the entry's id.
OLDEST = (
    COMMON
    + """
local first = redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1)[1]
if not first then return -1 end
local time = redis.call('TIME')
return math.max(0, time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(string.match(first[1], '^%d+')))
"""
)
