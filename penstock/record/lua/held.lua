-- Requests that are held, and when to look whether they still are.
--
-- KEYS[1]  held     sorted set, a stage's: request ids, by the time in ms after which their lease may have run out
-- ARGV     from now, in ms; request ids
--
-- Replies  how many are new here
--
-- Crash    before a claim: the set names a request that nobody holds, and who looks finds that out. It is written before
--          the claim and with each renewal, so a request that is held is named here.

local time = redis.call('TIME')
local due = time[1] * 1000 + math.floor(time[2] / 1000) + ARGV[1]
local words = {}
for i = 2, #ARGV do
  words[#words + 1] = due
  words[#words + 1] = ARGV[i]
end
return redis.call('ZADD', KEYS[1], unpack(words))
