-- Somebody wants a request to stop, perhaps before any worker saw it.
--
-- KEYS[1]  record   hash
-- ARGV     keep of a pending record in ms, id, what `news` keys look like (a list for each session)
--
-- Replies  1 whoever holds or claims it is told, 0 it has ended already
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
