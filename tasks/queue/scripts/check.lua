-- What contradicts the invariants of the queue, as {kind, task, detail} rows. Read-only.
local rows = {'rows'}
local function report(kind, id, detail) rows[#rows + 1] = {kind, id, detail or ''} end
local UNFINISHED = {queued = true, learning = true, evaluating = true}
local ENDED_STATES = {published = true, rejected = true, failed = true, cancelled = true}

local entries = {}  -- task -> its entries in the stream
for _, found in ipairs(redis.call('XRANGE', STREAM, '-', '+')) do
  local entry, id = found[1], found[2][2]
  entries[id] = entries[id] or {}
  table.insert(entries[id], entry)
  if get(id, 'entry') ~= entry then report('entry_without_task', id, entry) end
end

for _, id in ipairs(redis.call('ZRANGE', INDEX, 0, -1)) do
  local state = get(id, 'state')
  local queued, ended = entries[id] or {}, redis.call('ZSCORE', ENDED, id)
  if not state then
    report('task_without_record', id)
  elseif UNFINISHED[state] then
    if #queued == 0 then report('task_lost', id, state) end
    if #queued > 1 then report('task_queued_twice', id, state) end
    if ended then report('task_ended_and_queued', id, state) end
  elseif ENDED_STATES[state] then
    if #queued > 0 then report('task_ended_and_queued', id, state) end
    if not ended then report('task_not_indexed', id, state) end
  else
    report('task_without_record', id, state)
  end
end

for _, id in ipairs(redis.call('ZRANGE', ENDED, 0, -1)) do
  if not redis.call('ZSCORE', INDEX, id) then report('task_not_indexed', id) end
end
return rows
