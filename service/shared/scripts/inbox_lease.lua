-- Own the inbox if no other server does, or for longer. ARGV: token, address, milliseconds. Returns the owner's
-- "token address". Invariant: one token owns the inbox; a server takes a new token whenever it has lost the inbox.
local OWNER = KEYS[1] .. ':inbox-owner'
local mine, owner = ARGV[1] .. ' ' .. ARGV[2], redis.call('GET', OWNER)
if not owner or owner == mine then
  redis.call('SET', OWNER, mine, 'PX', ARGV[3])
  return mine
end
return owner
