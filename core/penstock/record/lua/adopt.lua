-- Adopt partitions that no session reads: the reader's session has ended, or the reader does not progress. The caller's
-- session reads them from now on, until another session names them in a renewal.
--
-- KEYS[1]  readers   hash, see renew.lua
-- KEYS[2]  sessions  sorted set, see claim.lua
-- ARGV     session, number of topics that its worker reads, these topics, their partitions that no session has named
--          for some time
--
-- Replies  all partitions of these topics that this session reads, each named `topic:number`
--
-- Crash    after: the session expires, and another session adopts the partitions.

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
