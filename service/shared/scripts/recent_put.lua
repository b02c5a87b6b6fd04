-- Keep a recent prediction. Invariant: `recent-bytes` is the sum of the sizes in the index, and at most `max_bytes`.
-- A repeated call changes nothing.
local prefix = KEYS[1]
local id, sha256, payload = ARGV[1], ARGV[2], ARGV[3]
local milliseconds, max_bytes, max_count = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local INDEX, BYTES = prefix .. ':recent-index', prefix .. ':recent-bytes'

local function drop(member)
  redis.call('DEL', prefix .. ':recent:' .. string.match(member, '^%S+'))
  redis.call('ZREM', INDEX, member)
  redis.call('DECRBY', BYTES, string.match(member, '%d+$'))
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
if redis.call('ZADD', INDEX, 'NX', now, id .. ' ' .. sha256 .. ' ' .. #payload) == 1 then
  redis.call('INCRBY', BYTES, #payload)
end
redis.call('SET', prefix .. ':recent:' .. id, payload, 'PX', milliseconds)
for _, member in ipairs(redis.call('ZRANGEBYSCORE', INDEX, '-inf', now - milliseconds, 'LIMIT', 0, 100)) do drop(member) end
while tonumber(redis.call('GET', BYTES)) > max_bytes or redis.call('ZCARD', INDEX) > max_count do
  drop(redis.call('ZRANGE', INDEX, 0, 0)[1])
end
return redis.call('ZCARD', INDEX)
