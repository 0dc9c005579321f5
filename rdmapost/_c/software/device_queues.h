/* The queues of software devices, and the work requests in them; queue_types.c has their types. */
#ifndef RDMAPOST_DEVICE_QUEUES_H
#define RDMAPOST_DEVICE_QUEUES_H

#include "software/internal.h"

/* How many SGEs a work request holds as they were posted; with more, it holds Python objects. */
enum { RP_MAX_SGES = 4 };

/* A work request as the device holds it. */
struct wqe {
	PyObject_HEAD
	union {
		struct ibv_send_wr send;
		struct rp_built_wr built;
		struct ibv_recv_wr recv;
		struct ibv_ops_wr op;
	} wr; /* as posted; its pointers are no longer valid */
	unsigned int opcode, flags; /* for a send or an operation */
	unsigned int num_sge; /* more than RP_MAX_SGES: they are in `sges` */
	struct ibv_sge sge[RP_MAX_SGES];
	PyObject *sges; /* a sequence of (addr, length, lkey), or NULL: they are in `sge` */
	PyObject *data, *hdr; /* bytes copied when it was posted, or NULL */
	PyObject *ah, *window, *region; /* the objects that its handles named then, or NULL */
	PyObject *owner; /* if the device itself posted the WQE, what receives its status */
};

/* A work queue, or a completion queue, which uses few of these fields. */
struct device_queue {
	PyObject_HEAD
	PyObject *pending; /* a deque of WQEs not yet done, or of entries not yet polled */
	unsigned int armed; /* which entries raise an event: 0 (none), or ARMED_... */
	unsigned int depth, max_sge, max_inline, max_tso_header;
	unsigned int used; /* occupied slots */
	unsigned int silent; /* WQEs without a completion; the next completion frees their slots */
	unsigned int last_handle; /* given to a matching-list entry */
	unsigned int refuses; /* the errno with which every post fails, or 0 */
	unsigned int prompt; /* posts are executed at once, rather than waiting for a message */
	PyObject *faults; /* for sends: the injected failures (software/faults.c) */
	PyObject *slots; /* for operations: the queue whose slots matching-list entries occupy */
	PyObject *fast_path; /* for sends: how C executes the common ones (fast_path.c), or NULL */
	unsigned int hidden; /* entries at the end that a verb in progress may still roll back */
};

enum { ARMED_SOLICITED = 1, ARMED_NEXT };

#define QUEUE(object) ((struct device_queue *)(object))

/* The types of these structs. */
RP_SHARED PyObject *rp_wqe_type, *rp_device_queue_type;

/* Return a new tuple of (addr, length, lkey). */
PyObject *rp_tuple_of_sges(const struct ibv_sge *sge, unsigned int count);

/* Make all entries of a completion queue visible to polls. */
static inline void rp_show_entries(struct device_queue *cq)
{
	RP_STORE(&cq->hidden, 0);
}

/* Append an entry that polls do not see yet; 0, or -1 without an exception. */
int rp_append_hidden(struct device_queue *cq, PyObject *entry);
/* Undo rp_append_hidden(): remove and return the last entry. */
PyObject *rp_withdraw(struct device_queue *cq);
/*
 * Queue an event for an added entry, if the completion queue is armed for it, and make the
 * channel's eventfd readable.
 */
void rp_announce(struct device_queue *cq, PyObject *events, int fd, int solicited);

#endif
