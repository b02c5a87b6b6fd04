-- Take tokens from the bucket of a key. ARGV: key, tokens, tokens to give back before, tokens per second, burst. Returns
-- the milliseconds until there are enough; then none are taken. A repeated call may take tokens twice: that only limits
-- the key a little more.
local bucket, tokens, back = KEYS[1] .. ':rate:' .. ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local rate, burst = tonumber(ARGV[4]), tonumber(ARGV[5])
local time = redis.call('TIME')
local now = time[1] + time[2] / 1e6
local state = redis.call('HMGET', bucket, 'tokens', 'filled')
local left, filled = tonumber(state[1] or burst), tonumber(state[2] or now)
left = math.min(burst, left + math.max(0, now - filled) * rate + back)
local wait = 0
if left < tokens then wait = math.ceil((tokens - left) / rate * 1000) else left = left - tokens end
redis.call('HSET', bucket, 'tokens', string.format('%.6f', left), 'filled', string.format('%.6f', now))
redis.call('PEXPIRE', bucket, math.ceil(burst / rate * 1000) + 1000)
return wait
