-- Milliseconds since the first unfinished task was queued, by the clock of Redis, which also made the entry id. Read-only.
local first = redis.call('XRANGE', STREAM, '-', '+', 'COUNT', 1)[1]
if not first then return {} end
local time = redis.call('TIME')
return {math.max(0, time[1] * 1000 + math.floor(time[2] / 1000) - tonumber(string.match(first[1], '^%d+')))}
