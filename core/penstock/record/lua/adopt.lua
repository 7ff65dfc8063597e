-- Parts of the topics that nobody reads: their reader's session is over, or it does not progress. Who asks reads them from
-- now on, until another says that it does.
--
-- KEYS[1]  readers   hash, see renew.lua
-- KEYS[2]  sessions  sorted set, see claim.lua
-- ARGV     session, number of topics that its worker reads, these topics, parts of them that no session has named for some
--          time
--
-- Replies  all parts of these topics, each named `topic:number`, that are this session's to read
--
-- Crash    after: the session runs out, and another adopts them.

if not redis.call('ZSCORE', KEYS[2], ARGV[1]) then return {} end
local is_read, mine = {}, {}
for i = 3, 2 + ARGV[2] do is_read[ARGV[i]] = true end
for i = 3 + ARGV[2], #ARGV do redis.call('HSETNX', KEYS[1], ARGV[i], ARGV[1]) end
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local part, reader = all[i], all[i + 1]
  if is_read[string.match(part, '(.*):')] then
    if reader == '' or not redis.call('ZSCORE', KEYS[2], reader) then
      redis.call('HSET', KEYS[1], part, ARGV[1])
      reader = ARGV[1]
    end
    if reader == ARGV[1] then mine[#mine + 1] = part end
  end
end
return mine
