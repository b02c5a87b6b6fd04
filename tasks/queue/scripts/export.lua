-- Everything of the queue at one moment, except idempotency keys: {sequence, unfinished tasks in their order,
-- {task, index score, ended score or '', record}, ...}. Read-only.
local entries, rows = {}, {redis.call('GET', prefix .. ':sequence') or '0', {}}
for _, found in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  entries[#entries + 1] = found[2][2]
end
rows[2] = entries
for _, id in ipairs(redis.call('ZRANGE', INDEX, 0, -1)) do
  rows[#rows + 1] = {id, redis.call('ZSCORE', INDEX, id), redis.call('ZSCORE', ENDED, id) or '', record(id)}
end
return rows
