-- A worker that leaves in good order reads nothing any more. What it read as a member goes to others, the bus sees to that;
-- what it had adopted is adopted by another.
--
-- KEYS[1]  readers   hash, see renew.lua
-- ARGV     session, the parts that it read as a member
--
-- Crash    before: all of them are adopted.

for i = 2, #ARGV do
  if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[1] then redis.call('HDEL', KEYS[1], ARGV[i]) end
end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i + 1] == ARGV[1] then redis.call('HSET', KEYS[1], all[i], '') end
end
return 1
