/* Handing a chain of work requests to the device. */
#ifndef RDMAPOST_SUBMIT_H
#define RDMAPOST_SUBMIT_H

#include "posting/wr_types.h"

/* Every work request begins with its wr_id and next pointer. */
struct link {
	uint64_t wr_id;
	struct link *next;
};

/*
 * A device's answer to a list: an errno or 0, and how many work requests it accepted, or -1 if that
 * is unknown.
 */
struct outcome {
	int code;
	int64_t posted;
};

/* The outcome of a call that has returned `code` and set `*bad_wr`. */
struct outcome rp_outcome_of(int code, const struct link *chain, const void *bad, size_t count);

static inline struct outcome rp_submit_chain(int verb, void *object, void *wrs, size_t count)
{
	union {
		struct ibv_send_wr *send;
		struct ibv_recv_wr *recv;
		struct ibv_ops_wr *op;
	} bad = { NULL };
	int code = verb == SEND	    ? ibv_post_send(object, wrs, &bad.send) :
		   verb == RECV	    ? ibv_post_recv(object, wrs, &bad.recv) :
		   verb == SRQ_RECV ? ibv_post_srq_recv(object, wrs, &bad.recv) :
				      ibv_post_srq_ops(object, wrs, &bad.op);

	return code || bad.send ? rp_outcome_of(code, wrs, bad.send, count) :
				  (struct outcome){ 0, (int64_t)count };
}

#endif
