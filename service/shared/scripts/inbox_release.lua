-- Own the inbox no longer. ARGV: token, address.
local OWNER = KEYS[1] .. ':inbox-owner'
if redis.call('GET', OWNER) == ARGV[1] .. ' ' .. ARGV[2] then redis.call('DEL', OWNER) end
return 'released'
