/*
 * The shim: what the compiled module adds to <infiniband/verbs.h>.
 *
 * The header defines the posting calls as static inline, so no library exports
 * them. Here they are renamed while the header is read, and their names are
 * declared as ordinary functions: symbols.c defines them, and they are the only
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

#define RP_EXPORT __attribute__((visibility("default")))

RP_EXPORT int ibv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
			    struct ibv_send_wr **bad_wr);
RP_EXPORT int ibv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
			    struct ibv_recv_wr **bad_wr);
RP_EXPORT int ibv_post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
				struct ibv_recv_wr **bad_wr);
RP_EXPORT int ibv_post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op,
			       struct ibv_ops_wr **bad_op);
RP_EXPORT int ibv_poll_cq(struct ibv_cq *cq, int num_entries,
			  struct ibv_wc *wc);
RP_EXPORT int ibv_req_notify_cq(struct ibv_cq *cq, int solicited_only);

/* ---- loader.c: libibverbs, opened at first use -------------------------- */

/*
 * Open the library at `path` and fill the table of functions. Returns 0 if it
 * is open (now or already), else -1 with the reason in `why`, of `size` bytes.
 * The library is never closed.
 */
int rp_load(const char *path, char *why, size_t size);

/* Whether the open library has this symbol (1) or not (0). */
int rp_has_symbol(const char *name);

/* ibv_reg_mr, through ibv_reg_mr_iova2 where an optional access flag needs it. */
struct ibv_mr *rp_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			 unsigned int access);

/* ibv_create_cq without a cq_context. */
struct ibv_cq *rp_create_cq(struct ibv_context *context, int cqe,
			    struct ibv_comp_channel *channel, int comp_vector);

/* ibv_create_cq_ex for completions that also report tags (tag matching). */
struct ibv_cq *rp_create_cq_ex(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel,
			       int comp_vector);

/* ibv_get_async_event and ibv_ack_async_event in one call: no signal handler between them. */
int rp_get_async_event(struct ibv_context *context,
		       struct ibv_async_event *event);

/* ibv_query_port with the full struct (a macro in the header). */
int rp_query_port(struct ibv_context *context, uint8_t port_num,
		  struct ibv_port_attr *attr);

/* ibv_bind_mw, which the header defines only as an inline; no pointer may be NULL. */
int rp_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind);

static inline int64_t rp_now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* ---- poll.c: polling ----------------------------------------------------- */

/*
 * Poll up to `max` completions into `wc`, spinning for at most `spin_ns`
 * nanoseconds to get at least `min`. Returns the number polled, or -1
 * with errno set.
 */
int rp_poll_cq(struct ibv_cq *cq, struct ibv_wc *wc, int max, int min,
	       int64_t spin_ns);

/*
 * The same for an extended CQ, which also reports a tag-matching message's tag
 * and the sender's data: they go into `tm`, which is as long as `wc`.
 * An extended CQ does not report pkey_index, which is set to 0.
 */
int rp_poll_cq_ex(struct ibv_cq_ex *cq, struct ibv_wc *wc,
		  struct ibv_wc_tm_info *tm, int max, int min, int64_t spin_ns);

#endif
