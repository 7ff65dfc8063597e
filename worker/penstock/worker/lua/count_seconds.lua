-- Add a worker's seconds to the sums of a day, once: a call whose reply was lost may be made again.
--
-- KEYS[1]  day   hash, microseconds by what they were spent on
-- KEYS[2]  last  string, the number of this worker's last call
-- ARGV     number of this call, seconds for which it is remembered, then fields and microseconds
--
-- Replies  1 added, 0 it was added before
--
-- Crash    after it a worker's last seconds may be missing.

if redis.call('GET', KEYS[2]) == ARGV[1] then return 0 end
for at = 3, #ARGV, 2 do redis.call('HINCRBY', KEYS[1], ARGV[at], ARGV[at + 1]) end
redis.call('SET', KEYS[2], ARGV[1], 'EX', ARGV[2])
return 1
