-- Replace the keys (ARGV[2]) if no other process has changed them since they were read (ARGV[1], empty: none).
local found = redis.call("GET", KEYS[1] .. ":keys") or ""
if found == ARGV[2] then
  return 1 -- by an earlier attempt that got no answer
end
if found ~= ARGV[1] then
  return 0
end
redis.call("SET", KEYS[1] .. ":keys", ARGV[2])
return 1
