-- Record changes of the inbox. ARGV: token, address, milliseconds of the lease, the stream entry that caused the changes
-- or '', seconds that the inbox has run, number of deleted novelties, their ids, then ids and rows in turn.
-- Invariants: only the owner changes the inbox; a record of the stream is applied and removed at once, so that it counts
-- once whoever applies it. A repeated call changes nothing.
local prefix = KEYS[1]
local OWNER, ROWS, STREAM = prefix .. ':inbox-owner', prefix .. ':inbox-rows', prefix .. ':inbox-stream'
if redis.call('GET', OWNER) ~= ARGV[1] .. ' ' .. ARGV[2] then return 'lost' end
redis.call('PEXPIRE', OWNER, ARGV[3])
if ARGV[4] ~= '' then redis.call('XDEL', STREAM, ARGV[4]) end
redis.call('SET', prefix .. ':inbox-ran', ARGV[5])
local first_row = 7 + tonumber(ARGV[6])
for i = 7, first_row - 1 do redis.call('HDEL', ROWS, ARGV[i]) end
for i = first_row, #ARGV, 2 do redis.call('HSET', ROWS, ARGV[i], ARGV[i + 1]) end
return 'committed'
