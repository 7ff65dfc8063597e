-- Append the next tokens of a request to its log, and publish them to live readers: all of them or none.
--
-- KEYS[1]  record   hash
-- KEYS[2]  log      stream; the token at position p is the entry `p-1` (Redis has no entry 0-0)
-- ARGV     live channel, ttl of a pending record in ms, epoch, number of tokens when the request was claimed, position
--          of the first token, rolling hash after the last token, then for each token its event as JSON
--
-- Replies  1  appended, now or by an earlier copy of this same call
--          0  fenced: the epoch is another one, the log has its end, the position is not the next one, or the log is
--             gone
--          2  cancelled: not appended
--
-- Crash    before: the next worker that claims the request computes these tokens. After: it reads them from the log.
--
-- An attempt resets the count of attempts if it makes more tokens than each attempt before it, or more than 256
-- (`GOOD_PROGRESS`). A request whose every attempt makes one token and then kills its worker therefore exhausts its
-- attempts, like a request whose attempts make no token.

local r = redis.call('HMGET', KEYS[1], 'epoch', 'tokens', 'stage', 'cancelled', 'most')
local n, position, count = tonumber(r[2]), tonumber(ARGV[5]), #ARGV - 6
if r[1] ~= ARGV[3] then return 0 end
if position < n then  -- the worker may have sent this call again because the first reply was lost
  local last = position + count - 1 .. '-1'  -- the last token's event has the hash of all tokens up to it
  local entry = redis.call('XRANGE', KEYS[2], last, last)[1]
  return entry and entry[2][2] == ARGV[#ARGV] and 1 or 0
end
if r[3] == 'end' then return 0 end
if r[4] then return 2 end
if position > n then return 0 end

for i = 1, count do  -- a log that lost its tokens is not created again: the next claim starts from the beginning
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
