-- The number of kept tasks per state, as states and numbers in turn. Read-only.
local counts, flat = {}, {}
for _, id in ipairs(redis.call('ZRANGE', INDEX, 0, -1)) do
  local state = get(id, 'state')
  if state then counts[state] = (counts[state] or 0) + 1 end
end
for state, number in pairs(counts) do
  flat[#flat + 1] = state
  flat[#flat + 1] = number
end
return flat
