"""The columns of the inbox, and how a file of an earlier schema gets them."""

SCHEMA = 2

# `seen` numbers the sightings: the order of last_seen, without its ties and whatever the clock does.
CREATE = f"""
BEGIN;
CREATE TABLE novelties (
    id TEXT PRIMARY KEY,
    seen INTEGER NOT NULL UNIQUE,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL,
    count INTEGER NOT NULL,
    state TEXT NOT NULL,
    version INTEGER NOT NULL,
    score REAL,
    calibrated_score REAL NOT NULL,
    p_novel REAL NOT NULL,
    nearest TEXT NOT NULL,
    prediction_id TEXT NOT NULL,
    client TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    width INTEGER NOT NULL,
    height INTEGER NOT NULL,
    hash BLOB NOT NULL,
    embedding BLOB,
    label TEXT,
    note TEXT
);
CREATE INDEX novelties_listed ON novelties (state, seen);
CREATE INDEX novelties_least ON novelties (state = 'new', seen);
CREATE INDEX novelties_aged ON novelties (last_seen);
PRAGMA user_version = {SCHEMA};
COMMIT;
"""

# Since schema 2 people may put an answer that was not `novel` into the inbox, and say why.
FROM_1 = f"""
BEGIN;
ALTER TABLE novelties ADD COLUMN label TEXT;
ALTER TABLE novelties ADD COLUMN note TEXT;
PRAGMA user_version = {SCHEMA};
COMMIT;
"""
