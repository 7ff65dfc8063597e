-- Somebody wants a request to stop, perhaps before any worker saw it.
--
-- KEYS[1]  record   hash
-- ARGV     keep of a pending record in ms
--
-- Replies  1 whoever holds or claims it is told, 0 it has ended already
--
-- Crash    before: nothing happened.

if redis.call('HGET', KEYS[1], 'stage') == 'end' then return 0 end
redis.call('HSET', KEYS[1], 'cancelled', 1)
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return 1
