-- Hand a record to the owner of the inbox. ARGV: sender, number of the record, kind, payload, most records that may
-- wait. Invariant: a record is in the stream once. The numbers of a sender grow, so a repeated call is recognised.
local prefix, sender, number = KEYS[1], KEYS[1] .. ':inbox-sender:' .. ARGV[1], tonumber(ARGV[2])
local STREAM = prefix .. ':inbox-stream'
if tonumber(redis.call('GET', sender) or 0) >= number then return 'sent' end
if redis.call('XLEN', STREAM) >= tonumber(ARGV[5]) then return 'full' end
redis.call('XADD', STREAM, '*', 'kind', ARGV[3], 'data', ARGV[4])
redis.call('SET', sender, number, 'EX', 86400)
return 'sent'
