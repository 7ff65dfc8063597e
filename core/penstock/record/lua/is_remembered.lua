-- Say whether an id is remembered whose record has expired, see ended.lua.
--
-- KEYS[1]  record  hash
-- ARGV     id, format of `ended` keys, days for which ids are remembered
--
-- Replies  1 it is; 0 it has a record, or was never used, or is forgotten
--
-- Crash    it changes nothing.

if redis.call('HEXISTS', KEYS[1], 'stage') == 1 then return 0 end
return find_end(ARGV[2], tonumber(ARGV[3]), ARGV[1]) and 1 or 0
