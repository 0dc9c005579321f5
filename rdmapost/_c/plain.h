/*
 * What plain.c and poster.c share: the classes of work requests that go the
 * short way, and a queue that takes them.
 */
#ifndef RDMAPOST_PLAIN_H
#define RDMAPOST_PLAIN_H

#include "door.h"

enum { KINDS = 16, NUMBERS = 6 };
/* The verbs, as rdmapost/posting.py numbers them; the last has no short way. */
enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* A class of work requests, and where its objects have what. */
struct kind {
	PyObject *type;
	uint32_t opcode;
	int writes; /* its buffers are written to */
	int atomic;
	int has_sges, has_flags, has_ah;
	struct rp_slot wr_id, sg_list, send_flags, ah;
	int numbers;
	struct {
		struct rp_slot slot;
		size_t at, size; /* in struct ibv_send_wr */
	} number[NUMBERS];
};

extern struct kind rp_kinds[KINDS];
extern int rp_kinds_known;

struct poster {
	PyObject_HEAD
	struct rp_lock *lock;
	struct rp_in_flight *in_flight;
	PyObject *pd;
	int verb, checked, datagram, max_sge;
	uint64_t room; /* work requests that may be outstanding */
	uint64_t most; /* bytes in one message */
	char takes[KINDS];
	uint32_t flags[KINDS]; /* those that are allowed */
	char *records;
	size_t size, used; /* bytes there, and those of this post */
};

/*
 * Write a work request as the next record, under the next ticket.  Returns
 * whether it is plainly right, and new references to its wr_id and to what has
 * to stay alive; where it is not, they may be NULL.
 */
int rp_put(struct poster *p, const struct kind *kind, PyObject *wr,
	   PyObject **wr_id, PyObject **refers_to);

/*
 * Write an SGE, or a tuple of so many, if a work request of that kind may have
 * them and they are no more than its message holds; returns whether.
 */
int rp_put_sges(const struct poster *p, const struct kind *kind,
		PyObject *gathered, struct ibv_sge *sge, int count);

#endif
