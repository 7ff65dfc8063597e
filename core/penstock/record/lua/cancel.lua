-- Cancel a request, also before a worker has read its message.
--
-- KEYS[1]  record   hash
-- ARGV     ttl of a pending record in ms, id, format of `news` keys (a list for each session)
--
-- Replies  1 the worker that holds the request, or claims it later, is notified; 0 the request has ended already
--
-- Crash    before: nothing happened.

local r = redis.call('HMGET', KEYS[1], 'stage', 'session', 'cancelled')
if r[1] == 'end' then return 0 end
redis.call('HSET', KEYS[1], 'cancelled', 1)
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
if (r[2] or '') ~= '' and not r[3] then
  local news = string.format(ARGV[3], r[2])
  redis.call('RPUSH', news, 'c:' .. ARGV[2])
  redis.call('PEXPIRE', news, ARGV[1])
end
return 1
