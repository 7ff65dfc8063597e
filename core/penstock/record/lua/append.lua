-- The next tokens of a request: into the log and to the live readers, all of them or none.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream; the token at position p is the entry `p-1` (Redis has no entry 0-0)
-- ARGV     live channel, keep of a pending record in ms, epoch, number of tokens when it was claimed, position of the
--          first token, rolling hash with the last one, and for each token its event as JSON
--
-- Replies  1  written, or it was written before by this same call
--          0  fenced: another epoch, an ended stream, a position that is not the next one, or a log that is gone
--          2  cancelled: not written
--
-- Crash    before: the next holder makes these tokens. After: it finds them in the log and keeps them.
--
-- Attempts are forgiven by the one that makes more tokens than each before it, or more than 256 (`GOOD_PROGRESS`): a request
-- that lets each worker make one token, and then kills it, is given up like one that lets it make none.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'tokens', 'stage', 'cancelled', 'most')
local n, position, count = tonumber(r[2]), tonumber(ARGV[5]), #ARGV - 6
if r[1] ~= ARGV[3] then return 0 end
if position < n then  -- sent again after its reply was lost?
  local last = position + count - 1 .. '-1'  -- its event has the hash of all tokens up to it
  local entry = redis.call('XRANGE', KEYS[2], last, last)[1]
  return entry and entry[2][2] == ARGV[#ARGV] and 1 or 0
end
if r[3] == 'end' then return 0 end
if r[4] then return 2 end
if position > n then return 0 end

for i = 1, count do  -- not without the tokens before them: then the next claim begins anew
  local id, event = n + i - 1 .. '-1', ARGV[6 + i]
  local added = n == 0 and redis.call('XADD', KEYS[2], id, 'e', event)
  if not (added or redis.call('XADD', KEYS[2], 'NOMKSTREAM', id, 'e', event)) then return 0 end
end
local made = n + count - ARGV[4]
if made > tonumber(r[5] or 0) then
  redis.call('HSET', KEYS[1], 'tokens', n + count, 'hash', ARGV[6], 'attempts', 0, 'most', math.min(made, 256))
else
  redis.call('HSET', KEYS[1], 'tokens', n + count, 'hash', ARGV[6])
end
if n == 0 then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
for i = 1, count do redis.call('PUBLISH', ARGV[1], ARGV[6 + i]) end
return 1
