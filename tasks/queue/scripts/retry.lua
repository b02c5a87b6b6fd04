-- Queue an ended task again, or withdraw the cancellation of one under way. Invariant: a learned task stays published.
local id = args.id
ensure_group()
local state = get(id, 'state')
if not state then return {'unknown'} end
if get(id, 'submission') == args.submission then return {'queued', record(id)} end  -- repeated call
if state == 'published' and not can_retry(state) then return {'published', record(id)} end
if can_retry(state) then
  if is_full() then return {'full'} end
  enqueue(id)
end
unset(id, 'cancel_requested')
return {'queued', record(id)}
