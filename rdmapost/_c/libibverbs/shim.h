/*
 * The shim: what the compiled module adds to <infiniband/verbs.h>.
 *
 * The header defines the posting calls as static inline, so no library exports
 * them. Here they are renamed while the header is read, and their names are
 * declared as ordinary functions: shim.c defines them, and they are the only
 * symbols (besides PyInit__verbs) that the module exports.
 */
#ifndef RDMAPOST_SHIM_H
#define RDMAPOST_SHIM_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ibv_post_send header_ibv_post_send
#define ibv_post_recv header_ibv_post_recv
#define ibv_post_srq_recv header_ibv_post_srq_recv
#define ibv_post_srq_ops header_ibv_post_srq_ops
#define ibv_poll_cq header_ibv_poll_cq
#define ibv_req_notify_cq header_ibv_req_notify_cq
#include <infiniband/verbs.h>
#undef ibv_post_send
#undef ibv_post_recv
#undef ibv_post_srq_recv
#undef ibv_post_srq_ops
#undef ibv_poll_cq
#undef ibv_req_notify_cq

/* Their names, parameters and arguments. */
#define RP_SHIM(F)                                                                                \
	F(ibv_post_send,                                                                          \
	  (struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad_wr),               \
	  (qp, wr, bad_wr))                                                                       \
	F(ibv_post_recv,                                                                          \
	  (struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr),               \
	  (qp, wr, bad_wr))                                                                       \
	F(ibv_post_srq_recv,                                                                      \
	  (struct ibv_srq *srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad_wr),             \
	  (srq, wr, bad_wr))                                                                      \
	F(ibv_post_srq_ops,                                                                       \
	  (struct ibv_srq *srq, struct ibv_ops_wr *op, struct ibv_ops_wr **bad_op),               \
	  (srq, op, bad_op))                                                                      \
	F(ibv_poll_cq, (struct ibv_cq *cq, int num_entries, struct ibv_wc *wc),                   \
	  (cq, num_entries, wc))                                                                  \
	F(ibv_req_notify_cq, (struct ibv_cq *cq, int solicited_only), (cq, solicited_only))

#define RP_DECLARE(name, parameters, arguments) \
	__attribute__((visibility("default"))) int name parameters;
RP_SHIM(RP_DECLARE)

#include "libibverbs/shim.cdef.h"

/* Not in the headers before rdma-core 44 and 45. */
enum { RP_WR_FLUSH = 14, RP_WR_ATOMIC_WRITE = 15 };

static inline int rp_is_built(const struct ibv_send_wr *wr)
{
	return (int)wr->opcode == RP_WR_FLUSH || (int)wr->opcode == RP_WR_ATOMIC_WRITE;
}

/*
 * struct ibv_qp_ex of rdma-core 45, whichever header this is compiled with: releases only add
 * members at its end. If a library lacks the last members, its drivers do not know the members'
 * bits in send_ops_flags, and refuse to create a queue pair with those bits.
 */
struct rp_qp_ex {
	_Alignas(8) char since_24[offsetof(struct ibv_qp_ex, wr_abort) + sizeof(void (*)(void))];
	void (*wr_atomic_write)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr,
				const void *atomic_wr);
	void (*wr_flush)(struct ibv_qp_ex *qp, uint32_t rkey, uint64_t remote_addr, size_t len,
			 uint8_t type, uint8_t level);
};

static inline int64_t rp_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

#endif
