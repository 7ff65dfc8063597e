-- Parts of the topics that nobody reads: their reader's session is over, or it does not progress. Who asks reads them from
-- now on, until another says that it does.
--
-- KEYS[1]  readers   hash, a stage's, see renew.lua
-- KEYS[2]  sessions  sorted set, a stage's, see claim.lua
-- ARGV     session, parts that no session has named for some time
--
-- Replies  all parts that are this session's to read
--
-- Crash    after: the session runs out, and another adopts them.

if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {} end
for i = 2, #ARGV do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[1]) end
local mine, all = {}, redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local reader = all[i + 1]
  if reader == '' or not redis.call('ZSCORE', KEYS[2], reader) then
    redis.call('HSET', KEYS[1], all[i], ARGV[1])
    reader = ARGV[1]
  end
  if reader == ARGV[1] then mine[#mine + 1] = all[i] end
end
return mine
