-- One token: into the log and to the live readers, or refused.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream; the token at position p is the entry `p-1` (Redis has no entry 0-0)
-- ARGV     live channel, keep of a pending record in ms, epoch, position, rolling hash with this token, event as JSON
--
-- Replies  1  written, or it was written before by this same call
--          0  fenced: another epoch, an ended stream, or a position that is not the next one
--          2  cancelled: not written
--
-- Crash    before: the next holder makes this token. After: it finds the token in the log and keeps it.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'tokens', 'stage', 'cancelled')
local n, position = tonumber(r[2]), tonumber(ARGV[4])
if r[1] ~= ARGV[3] then return 0 end
if position < n then  -- sent again after its reply was lost?
  local entry = redis.call('XRANGE', KEYS[2], ARGV[4] .. '-1', ARGV[4] .. '-1')[1]
  return entry and entry[2][2] == ARGV[6] and 1 or 0
end
if r[3] == 'end' then return 0 end
if r[4] then return 2 end
if position > n then return 0 end

redis.call('XADD', KEYS[2], ARGV[4] .. '-1', 'e', ARGV[6])
redis.call('HSET', KEYS[1], 'tokens', n + 1, 'hash', ARGV[5], 'attempts', 0)
if n == 0 then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
redis.call('PUBLISH', ARGV[1], ARGV[6])
return 1
