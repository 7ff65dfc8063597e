-- Move one entry from a stream to another, once.
--
-- KEYS[1]  from  stream
-- KEYS[2]  to    stream
-- ARGV     its id, the words of the new entry
--
-- Replies  1 moved, 0 it is not there any more

if redis.call('XDEL', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[2], '*', unpack(ARGV, 2))
return 1
