-- Disown all partitions of a worker that shuts down. The bus assigns the partitions that it read as a member to other
-- members. Another session adopts the partitions that this one had adopted.
--
-- KEYS[1]  readers   hash, see renew.lua
-- ARGV     session, the partitions that it read as a member
--
-- Crash    before: other sessions adopt all of the partitions.

for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i + 1] == ARGV[1] then redis.call('HSET', KEYS[1], all[i], '') end
end
return 1
