-- A worker says that it lives, and which parts of the topics it reads; it hears what it has to know.
--
-- KEYS[1]  sessions  sorted set, see claim.lua
-- KEYS[2]  news      list of the session's
-- KEYS[3]  readers   hash, the pipeline's: parts of topics, and the session that reads each; '' where it does not progress
-- ARGV     session, lease in ms, until when it lasts as far as its worker knows (0: it begins now), number of parts that
--          it reads, these parts, parts that it does not read any more
--
-- Replies  {until, now, news…}, times in ms, or
--          {}  it is over, or the server forgot its last renewal, and with that perhaps what it holds: open another one
--
-- Crash    the session runs out. News that were given and not heard are heard with the next token: it is refused.

local known, lasts = tonumber(ARGV[3]), redis.call('ZSCORE', KEYS[1], ARGV[1])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- No renewal reaches so far ahead: the clock went back since, and a reap may have lowered what is known here.
local went_back = known > now + 1.5 * ARGV[2]
if known > 0 and (not lasts or (tonumber(lasts) < known and not went_back)) then return {} end
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
for i = 5, 4 + ARGV[4] do redis.call('HSET', KEYS[3], ARGV[i], ARGV[1]) end
for i = 5 + ARGV[4], #ARGV do
  if redis.call('HGET', KEYS[3], ARGV[i]) == ARGV[1] then redis.call('HSET', KEYS[3], ARGV[i], '') end
end
local reply = {now + ARGV[2], now}
for _, word in ipairs(redis.call('LRANGE', KEYS[2], 0, -1)) do reply[#reply + 1] = word end
redis.call('DEL', KEYS[2])
return reply
