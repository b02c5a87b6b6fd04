-- The part that all scripts of the task queue share. The text of a script is appended to it.
--
-- KEYS[1] is the prefix of all keys, `openworld:{<id of the data folder>}`:
--   <prefix>:tasks               stream of unfinished tasks, one entry {task: id} per task
--   <prefix>:task:<id>           hash: the record of a task, and its lease (`entry`, `claim`)
--   <prefix>:index               sorted set of all kept tasks, in order of submission
--   <prefix>:ended               sorted set of ended tasks, in order of ending; the oldest are deleted
--   <prefix>:idempotency:<hash>  the task and batch that an idempotency key was used for; expires
--   <prefix>:sequence            counter that scores both sorted sets
--   <prefix>:paused              exists while workers claim no tasks
--   <prefix>:confirmed           when a replica was last asked to confirm a task
-- ARGV[1] is a JSON object: the settings of the queue and the arguments of the script.
-- ARGV[2], ... are fields and values for the record of the task.
--
-- Redis runs a script as a whole or not at all. A client cannot know whether a broken connection lost its request or
-- the reply, so it may send a script twice: a script recognises its repetition by a random `submission` or `claim`.
--
-- Redis Cluster hashes only the part in braces, so that all keys are on one node: keys of tasks are computed here, not
-- passed.
-- Redis 6.2 commands only. Replies to Lua are always RESP2.

local prefix, args = KEYS[1], cjson.decode(ARGV[1])
local STREAM, INDEX, ENDED = prefix .. ':tasks', prefix .. ':index', prefix .. ':ended'
local GROUP, UNHELD = args.group, args.unheld
local CAN_RETRY = {rejected = true, failed = true, cancelled = true}
local CANCELLED = 'cancelled while it was being learned'

local function key(id) return prefix .. ':task:' .. id end
local function get(id, field) return redis.call('HGET', key(id), field) end
local function set(id, ...) redis.call('HSET', key(id), ...) end
local function unset(id, ...) redis.call('HDEL', key(id), ...) end
local function record(id) return redis.call('HGETALL', key(id)) end
local function next_number() return redis.call('INCR', prefix .. ':sequence') end

-- Create the consumer group if it is absent. It starts at 0, so it delivers every entry of the stream.
local function ensure_group()
  local groups = redis.pcall('XINFO', 'GROUPS', STREAM)
  for _, group in ipairs(groups.err and {} or groups) do
    if group[2] == GROUP then return end
  end
  redis.call('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM')
end

-- The first delivered entry of the stream, or the given one: {entry, consumer, idle milliseconds, deliveries}.
local function pending(entry)
  return redis.call('XPENDING', STREAM, GROUP, entry or '-', entry or '+', 1)[1]
end

-- Whether the lease in `args` is valid: the entry is held by this consumer, was not delivered again, and the record
-- names this claim.
local function holds_lease()
  local held = pending(args.entry)
  return held and held[2] == args.consumer and held[4] == args.delivery and get(args.id, 'claim') == args.claim
end

-- Remove a consumer that holds nothing from the group, which would otherwise keep every worker name ever used.
local function remove_idle_consumer(consumer)
  if #redis.call('XPENDING', STREAM, GROUP, '-', '+', 1, consumer) == 0 then
    redis.call('XGROUP', 'DELCONSUMER', STREAM, GROUP, consumer)
  end
end

local function remove_entry(entry)
  redis.call('XACK', STREAM, GROUP, entry)
  redis.call('XDEL', STREAM, entry)
end

-- Whether an ended task may be queued again. A published one only after a roll back: `learned` tells whether a version
-- of the lineage has learned it.
local function can_retry(state) return CAN_RETRY[state] or (state == 'published' and not args.learned) end

-- Do not count the last attempt if it was marked so.
local function uncount(id)
  if get(id, 'uncounted') then redis.call('HINCRBY', key(id), 'attempts', -1) end
  unset(id, 'uncounted')
end

-- Queue a task at the end of the stream, as if it had never been tried.
local function enqueue(id)
  unset(id, 'progress', 'version', 'provisional', 'reason', 'result', 'cancel_requested', 'claim', 'released', 'checkpoint',
    'uncounted')
  set(id, 'state', 'queued', 'updated', args.now, 'attempts', 0, 'submission', args.submission,
    'entry', redis.call('XADD', STREAM, '*', 'task', id))
  redis.call('ZREM', ENDED, id)
end

-- Bring a task to a final state, and delete the oldest ended tasks beyond `history`.
local function finish(id, state, reason)
  local entry = get(id, 'entry')
  if entry then remove_entry(entry) end
  unset(id, 'entry', 'cancel_requested', 'reason')
  set(id, 'state', state, 'updated', args.now)
  if reason then set(id, 'reason', reason) end
  redis.call('ZADD', ENDED, next_number(), id)
  for _, old in ipairs(redis.call('ZRANGE', ENDED, 0, -1 - args.history)) do
    redis.call('DEL', key(old))
    redis.call('ZREM', ENDED, old)
    redis.call('ZREM', INDEX, old)
  end
end

-- Whether `max_waiting` tasks wait: all unfinished tasks except the leased one.
local function is_full()
  local first = pending()
  local leased = (first and first[2] ~= UNHELD) and 1 or 0
  return redis.call('XLEN', STREAM) - leased >= args.max_waiting
end
