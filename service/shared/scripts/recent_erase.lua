-- Remove the recent predictions on the images ARGV; returns their number.
local prefix = KEYS[1]
local INDEX, BYTES = prefix .. ':recent-index', prefix .. ':recent-bytes'
local erased, number = {}, 0
for _, sha256 in ipairs(ARGV) do erased[sha256] = true end
for _, member in ipairs(redis.call('ZRANGE', INDEX, 0, -1)) do
  local id, sha256, size = string.match(member, '^(%S+) (%S+) (%d+)$')
  if erased[sha256] then
    redis.call('DEL', prefix .. ':recent:' .. id)
    redis.call('ZREM', INDEX, member)
    redis.call('DECRBY', BYTES, size)
    number = number + 1
  end
end
return number
