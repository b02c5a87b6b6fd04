-- The fields `fields` of at most `limit` tasks in one of `states`, newest first, after the task `before`. Read-only.
local highest = '+inf'
if args.before then
  local score = redis.call('ZSCORE', INDEX, args.before)
  if not score then return {'unknown'} end
  highest = '(' .. score
end
local wanted, rows = {}, {'rows'}
for _, state in ipairs(args.states) do wanted[state] = true end
for _, id in ipairs(redis.call('ZREVRANGEBYSCORE', INDEX, highest, '-inf')) do
  if args.limit and #rows > args.limit then break end
  if wanted[get(id, 'state')] then rows[#rows + 1] = redis.call('HMGET', key(id), unpack(args.fields)) end
end
return rows
