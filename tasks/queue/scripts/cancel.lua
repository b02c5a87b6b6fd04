-- Cancel a task. Invariant: a queued task ends at once; a leased task is only marked, and its holder ends it.
local id = args.id
local state = get(id, 'state')
if not state then return {'unknown'} end
if state == 'queued' then
  finish(id, 'cancelled', 'cancelled before it was learned')
elseif state == 'learning' or state == 'evaluating' then
  set(id, 'cancel_requested', 1, 'updated', args.now)
elseif state ~= 'cancelled' then
  return {'ended', record(id)}
end
return {'cancelled', record(id)}
