-- Take a tenant's due events: no other gateway takes them before a set time.
--
-- KEYS[1]  events  sorted set: bodies, by the time at which each is due
-- ARGV     now, the time until which the events stay taken, most events to take
--
-- Replies  the events that were taken, the one that has been due longest first

local due = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', ARGV[1], 'LIMIT', 0, ARGV[3])
for _, event in ipairs(due) do
  redis.call('ZADD', KEYS[1], ARGV[2], event)
end
return due
