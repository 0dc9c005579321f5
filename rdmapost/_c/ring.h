/*
 * The ring in which a queue's work in flight stands, the oldest first.
 *
 * An entry is the wr_id of a work request and what it refers to, or, for a
 * prepared list, the list of its wr_ids and a list of what each refers to.
 */
#ifndef RDMAPOST_RING_H
#define RDMAPOST_RING_H

#include "door.h"

struct entry {
	PyObject *wr_id;
	PyObject *refers_to;
	uint64_t count; /* of work requests; of a list the first so many */
};

/* From `dropped` to `first` the entries are done but still there. */
struct ring {
	struct entry *entries;
	size_t size; /* a power of two, or 0 */
	size_t dropped, first, end;
};

static inline struct entry *entry_at(struct rp_in_flight *q, size_t index)
{
	return &q->ring->entries[index & (q->ring->size - 1)];
}

/* Record what is about to be posted; 0, or -1 with an exception. */
int rp_ring_add(struct rp_in_flight *q, PyObject *wr_id, PyObject *refers_to,
		uint64_t count);

/* Retire a work request and all before it; return its wr_id, or NULL. */
PyObject *rp_ring_complete(struct rp_in_flight *q, uint64_t ticket);

/* Give up what the entries that are done refer to. */
void rp_ring_drop_done(struct rp_in_flight *q);

/* Take the latest back. */
void rp_ring_forget_last(struct rp_in_flight *q, uint64_t count);

/* Forget everything. */
void rp_ring_clear(struct rp_in_flight *q);

#endif
