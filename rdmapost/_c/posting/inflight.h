/*
 * Work requests posted to a queue and not known to be done.
 *
 * A device returns only a work request's wr_id, and an error completion does
 * not even say which queue it was on. So we give it a ticket as wr_id, the
 * queue's number and a count, and restore the caller's wr_id from the queue's
 * records. These also hold the memory, windows and address handles that a work
 * request names, until it is known to be done.
 */
#ifndef RDMAPOST_INFLIGHT_H
#define RDMAPOST_INFLIGHT_H

#include "handles/handle.h"

/* An entry's state; a bind of unknown outcome stays RP_BIND or RP_UNBIND. */
enum {
	RP_FREE, RP_POSTED, RP_DONE, RP_MATCHED, RP_EARLY,
	RP_BIND, RP_UNBIND, RP_BOUND, RP_UNBOUND,
};

/* A work request, or a prepared list of them. */
struct rp_entry {
	PyObject *wr_id; /* an int, or a struct rp_sent */
	PyObject *held; /* one object, a tuple of them (for a bind: window, region), or NULL */
	uint32_t count; /* work requests; in a free or done slot, the next one */
	uint32_t removes; /* low half of the ticket of the receive that a TAG_DEL removes, or 0 */
	/*
	 * Unique in a queue that completes in any order; in order, the serial of the receive that a
	 * TAG_DEL removes, or a bind's place among all binds.
	 */
	uint64_t serial;
	unsigned char generation, state;
};

struct rp_in_flight {
	PyObject_HEAD
	uint64_t posted; /* work requests so far */
	uint64_t done; /* of these */
	uint64_t base; /* the queue's part of a ticket */
	uint64_t begun; /* work requests done in the first entry */
	struct rp_binder binder;
	struct rp_in_flight *tagged; /* what a TAG_DEL of this queue removes from */
	struct rp_entry *entries;
	size_t size; /* a power of two, or 0 */
	/*
	 * In order: a ring; entries from `dropped` to `first` are done but not dropped. In
	 * any order: slots, `end` of them taken; `free` and `retired` are lists of them,
	 * each 1 + the index of the first, or 0.
	 */
	size_t dropped, first, end;
	uint32_t free, retired;
	int in_order;
};

extern PyObject *rp_in_flight_type;

/*
 * Return a new reference to a ticket's queue, or NULL without an exception.
 * `queues` is a dict of them by number (Context._queues).
 */
struct rp_in_flight *rp_find_queue(PyObject *queues, uint64_t ticket);

/* Make room for `count` more entries; 0, or -1 with an exception. */
int rp_grow(struct rp_in_flight *q, size_t count);

static inline int rp_reserve(struct rp_in_flight *q, size_t count)
{
	/* Entries that are done count as taken until they are dropped. */
	return RP_READS_SLOTS && q->size - (q->end - q->dropped) >= count ? 0 : rp_grow(q, count);
}

/*
 * Record a work request that is about to be posted; the caller has reserved a free slot. Returns
 * its ticket; the other work requests in a list have the tickets that follow. Takes over the
 * references, and the rp_name() calls, for the objects that the record holds.
 */
struct rp_entry *rp_take_slot(struct rp_in_flight *q, uint64_t *ticket);

static inline uint64_t rp_record(struct rp_in_flight *q, struct rp_entry what)
{
	struct rp_entry *entry;
	uint64_t ticket;

	RP_BEGIN(q);
	if (q->in_order) {
		entry = &q->entries[q->end++ & (q->size - 1)];
		ticket = q->base | (q->posted & UINT32_MAX);
	} else {
		entry = rp_take_slot(q, &ticket);
		what.generation = entry->generation;
		what.serial = q->posted;
	}
	*entry = what;
	q->posted += what.count;
	RP_END();
	return ticket;
}

/*
 * Undo the record of what was not posted: the work request with this ticket, or the
 * last `count` of a prepared list. Hands over the entry's references if nothing of it
 * is left. In a queue in order it is the latest; if not (a signal handler has posted
 * meanwhile), it stays until the queue is reset.
 */
void rp_unrecord(struct rp_in_flight *q, uint64_t ticket, uint64_t count, struct rp_entry *taken);

/*
 * Retire a work request that has completed with a status and, if the queue completes in
 * order, all before it. Returns a new reference to the caller's wr_id, or NULL without an
 * exception if the ticket is not outstanding. Runs no Python code: rp_drop_done(), which
 * may run any, releases what is retired.
 */
PyObject *rp_complete(struct rp_in_flight *q, uint64_t ticket, int status);
void rp_drop_all_done(struct rp_in_flight *q);

static inline void rp_drop_done(struct rp_in_flight *q)
{
	if (!RP_READS_SLOTS || q->dropped != q->first || q->retired || q->tagged)
		rp_drop_all_done(q);
}

/* A message has matched this tagged receive; its data will follow. */
void rp_match(struct rp_in_flight *q, uint64_t ticket);

/*
 * Whether a work request is outstanding in a queue that completes in any order. Once it is done,
 * its slot and eventually its ticket are reused; its serial is not.
 */
int rp_is_outstanding(struct rp_in_flight *q, uint64_t ticket, uint64_t serial);

/*
 * Name the handles in what is held (see rp_entry) for a work request in flight, or undo that.
 * Returns the first that is not open, borrowed, or NULL.
 */
PyObject *rp_name_all(PyObject *held);
void rp_unname_all(PyObject *held);

/* ---- a prepared list in flight ------------------------------------------ */

/* What a post of a prepared list carries; immutable while in flight. */
struct rp_sent {
	PyObject_HEAD
	PyObject *wr_ids; /* a tuple */
	PyObject *held; /* a tuple of what each holds, or None */
};

extern PyObject *rp_sent_type;

/* Takes over the references; names what is held. */
PyObject *rp_make_sent(PyObject *wr_ids, PyObject *held);

#endif
