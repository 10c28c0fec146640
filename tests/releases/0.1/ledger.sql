PRAGMA application_id = 1396920898;
PRAGMA user_version = 1;
BEGIN TRANSACTION;
CREATE TABLE agent_pause (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        document TEXT NOT NULL
    ) STRICT;
INSERT INTO "agent_pause" VALUES(1,'{"externally_reset":[],"format":1,"pause":{"changes":[{"before":"true","during":"false","key":"dcgm"}],"devices":["GPU-b"],"ending":false,"id":"P-1","since":90.0,"way":"labels"}}');
CREATE TABLE audit (
        sequence INTEGER PRIMARY KEY,
        at REAL NOT NULL,
        name TEXT NOT NULL,
        device TEXT,
        scrub TEXT,
        actor TEXT NOT NULL,
        fields TEXT NOT NULL,
        prev_hash TEXT NOT NULL,
        hash TEXT NOT NULL
    ) STRICT;
INSERT INTO "audit" VALUES(1,100.0,'device.marked-dirty','GPU-a',NULL,'service','{"certificate":"C-1","tenant":"team-a"}','','5d6451a880ffc26fc522f49f348461e7d34b7c92fcc015622b2f7fc9b5888cf4');
INSERT INTO "audit" VALUES(2,100.0,'device.appeared','GPU-b',NULL,'service','{}','5d6451a880ffc26fc522f49f348461e7d34b7c92fcc015622b2f7fc9b5888cf4','6ffbd30f1617d48489fb48a693415239e29babaf3168344396dc5d22de089c84');
CREATE TABLE certificates (
        id TEXT PRIMARY KEY,
        device TEXT NOT NULL REFERENCES devices (device),
        next_grant INTEGER,
        seen INTEGER NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "certificates" VALUES('C-1','GPU-a',1,2,'{"attestation":null,"boot":"boot","covered":["memory"],"device":"GPU-a","driver":"1.0","format":1,"id":"C-1","issued_at":100.0,"key_id":null,"next_grant":1,"node":"node","not_covered":["on-chip"],"path":"slow","policy":"default","policy_digest":"abc","previous_grant":0,"rests_on":null,"scrub":"S-1","sequence":1,"signature":null}');
INSERT INTO "certificates" VALUES('C-2','GPU-a',NULL,2,'{"attestation":null,"boot":"boot","covered":["memory"],"device":"GPU-a","driver":"1.0","format":1,"id":"C-2","issued_at":100.0,"key_id":null,"next_grant":null,"node":"node","not_covered":["on-chip"],"path":"slow","policy":"default","policy_digest":"abc","previous_grant":0,"rests_on":null,"scrub":"S-1","sequence":1,"signature":null}');
CREATE TABLE chain (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        pruned_sequence INTEGER NOT NULL,
        pruned_hash TEXT NOT NULL,
        head_sequence INTEGER NOT NULL,
        head_hash TEXT NOT NULL
    ) STRICT;
INSERT INTO "chain" VALUES(1,0,'',2,'6ffbd30f1617d48489fb48a693415239e29babaf3168344396dc5d22de089c84');
CREATE TABLE compatibility (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        program_version TEXT NOT NULL,
        oldest_schema INTEGER NOT NULL,
        oldest_version TEXT NOT NULL
    ) STRICT;
INSERT INTO "compatibility" VALUES(1,'0.1.0',1,'0.1.0');
CREATE TABLE devices (
        device TEXT PRIMARY KEY,
        version INTEGER NOT NULL,
        hygiene TEXT NOT NULL,
        health TEXT NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "devices" VALUES('GPU-a',1,'in-use','suspect','{"admin_claims":[{"driver":"gpu.scrubber.dev","listed_pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"manager":null,"name":"training","namespace":"team-a","pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"released_at":100.5,"uid":"uid-claim"}],"baseline":{"actor":"uid:0","at":10.0,"conditions":[["ecc","off"]],"facts":[["vbios","96"]],"reason":"as delivered"},"boot":"boot","break_glass":{"actor":"uid:1000","reason":"a deadline","until":200.0},"cause":{"actor":"service","code":"heat","message":"The device is hot.","recovery_method":"wait","since":98.0},"certificate":null,"certificate_count":2,"clean_scrubs":0,"contaminated":false,"deferred_attempts":0,"device":"GPU-a","exclusive_use":false,"externally_reset":false,"failures":0,"format":1,"health":"suspect","hygiene":"in-use","last_grant":{"assignment":null,"at":101.0,"baseline":[{"container":"sandbox","pid":17,"started":4711}],"basis":"certificate","boot":"boot","certificate":null,"cgroups":[],"claim":{"driver":"gpu.scrubber.dev","listed_pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"manager":null,"name":"training","namespace":"team-a","pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"released_at":100.5,"uid":"uid-claim"},"kind":"other-tenant","path":null,"sequence":2,"started":""},"lifetime_counters":[["retired_pages",2]],"limits_count_from":40.0,"must_reset":false,"open_grants":[{"assignment":{"container":"main","devices":["GPU-a","GPU-z"],"pod":{"name":"web-0","namespace":"team-a","uid":"uid-1"},"resource":"","shares":[]},"at":101.0,"baseline":[{"container":"sandbox","pid":17,"started":4711}],"basis":"certificate","boot":"boot","certificate":"C-1","cgroups":[],"claim":null,"kind":"other-tenant","path":null,"sequence":1,"started":""},{"assignment":null,"at":101.0,"baseline":[{"container":"sandbox","pid":17,"started":4711}],"basis":"certificate","boot":"boot","certificate":null,"cgroups":[],"claim":{"driver":"gpu.scrubber.dev","listed_pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"manager":null,"name":"training","namespace":"team-a","pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"released_at":100.5,"uid":"uid-claim"},"kind":"other-tenant","path":null,"sequence":2,"started":""}],"recent_quarantines":[{"at":50.0,"code":"driver-timeout","tenant":"team-b"}],"recovery_attempts":[{"at":60.0,"operator_ordered":false,"reset":true}],"rests_on":"C-1","retry_at":null,"version":1,"warnings":[{"code":"heat","since":98.0}]}');
INSERT INTO "devices" VALUES('GPU-b',1,'dirty','quarantined','{"admin_claims":[],"baseline":null,"boot":"","break_glass":null,"cause":{"actor":"uid:1000","code":"operator","message":"Spare part ordered.","recovery_method":"operator","since":99.0},"certificate":null,"certificate_count":0,"clean_scrubs":0,"contaminated":false,"deferred_attempts":0,"device":"GPU-b","exclusive_use":false,"externally_reset":false,"failures":0,"format":1,"health":"quarantined","hygiene":"dirty","last_grant":null,"lifetime_counters":[],"limits_count_from":null,"must_reset":true,"open_grants":[],"recent_quarantines":[],"recovery_attempts":[],"rests_on":null,"retry_at":null,"version":1,"warnings":[]}');
CREATE TABLE grants (
        device TEXT NOT NULL REFERENCES devices (device),
        sequence INTEGER NOT NULL,
        seen INTEGER NOT NULL,
        document TEXT NOT NULL,
        PRIMARY KEY (device, sequence)
    ) STRICT, WITHOUT ROWID;
INSERT INTO "grants" VALUES('GPU-a',1,2,'{"assignment":{"container":"main","devices":["GPU-a","GPU-z"],"pod":{"name":"web-0","namespace":"team-a","uid":"uid-1"},"resource":"","shares":[]},"at":101.0,"baseline":[{"container":"sandbox","pid":17,"started":4711}],"basis":"certificate","boot":"boot","certificate":"C-1","cgroups":[],"claim":null,"format":1,"kind":"other-tenant","path":null,"sequence":1,"started":""}');
INSERT INTO "grants" VALUES('GPU-a',2,2,'{"assignment":null,"at":101.0,"baseline":[{"container":"sandbox","pid":17,"started":4711}],"basis":"certificate","boot":"boot","certificate":null,"cgroups":[],"claim":{"driver":"gpu.scrubber.dev","listed_pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"manager":null,"name":"training","namespace":"team-a","pods":[{"name":"web-0","namespace":"team-a","uid":"uid-1"}],"released_at":100.5,"uid":"uid-claim"},"format":1,"kind":"other-tenant","path":null,"sequence":2,"started":""}');
CREATE TABLE node (
        only INTEGER PRIMARY KEY CHECK (only = 1),
        document TEXT NOT NULL
    ) STRICT;
INSERT INTO "node" VALUES(1,'{"format":1,"overridden":[],"yields":[{"actor":"uid:0","reason":"driver upgrade","requester":"operator","since":99.5}]}');
CREATE TABLE scrubs (
        id TEXT PRIMARY KEY,
        device TEXT NOT NULL REFERENCES devices (device),
        finished INTEGER NOT NULL CHECK (finished IN (0, 1)),
        seen INTEGER NOT NULL,
        document TEXT NOT NULL
    ) STRICT, WITHOUT ROWID;
INSERT INTO "scrubs" VALUES('S-1','GPU-a',1,2,'{"actor":"uid:1000","certificate":"C-S-1","device":"GPU-a","ended":100.0,"format":1,"id":"S-1","outcome":"passed","path":"slow","started":99.0,"steps":[{"findings":[{"code":"residue","evidence":{"residue_bytes":7},"message":"Residue was found.","severity":"note","step":"memory"}],"measured":{"cleared_bytes":1024},"not_covered":["on-chip"],"seconds":0.25,"step":"memory","verdict":"passed"}],"trigger":"release"}');
INSERT INTO "scrubs" VALUES('S-2','GPU-b',0,2,'{"actor":"service","certificate":null,"device":"GPU-b","ended":null,"format":1,"id":"S-2","outcome":null,"path":"slow","started":99.0,"steps":[],"trigger":"release"}');
CREATE INDEX grants_by_age ON grants (seen);
CREATE INDEX certificates_by_age ON certificates (seen);
CREATE INDEX scrubs_by_age ON scrubs (seen);
CREATE INDEX scrubs_under_way ON scrubs (id) WHERE finished = 0;
CREATE INDEX audit_by_device ON audit (device, sequence);
CREATE TRIGGER audit_grows_at_its_head BEFORE INSERT ON audit
    WHEN NOT EXISTS (
        SELECT 1 FROM chain WHERE head_sequence = NEW.sequence - 1 AND head_hash = NEW.prev_hash
    )
    BEGIN SELECT RAISE(ABORT, 'an audit row must follow the head of the audit log'); END;
CREATE TRIGGER audit_moves_its_head AFTER INSERT ON audit
    BEGIN UPDATE chain SET head_sequence = NEW.sequence, head_hash = NEW.hash; END;
CREATE TRIGGER audit_is_never_changed BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER audit_shrinks_at_its_pruned_end BEFORE DELETE ON audit
    WHEN OLD.sequence > (SELECT pruned_sequence FROM chain)
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER chain_never_goes_back BEFORE UPDATE ON chain
    WHEN NEW.pruned_sequence < OLD.pruned_sequence OR NEW.head_sequence < OLD.head_sequence
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
CREATE TRIGGER chain_stays BEFORE DELETE ON chain
    BEGIN SELECT RAISE(ABORT, 'the audit log is append-only'); END;
COMMIT;
