/*
 * The C side of the soft device: a context whose table of operations is ours.
 *
 * The posting symbols follow qp->context->ops, so a context made here receives
 * exactly what a NIC's driver would.  Exported libibverbs functions must never
 * see it: they reach into a private part that it does not have.
 */
#include "soft.h"

#include <sys/timerfd.h>
#include <unistd.h>

struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops)
{
	struct verbs_context *context;

	if (!ops) {
		errno = EINVAL;
		return NULL;
	}
	context = calloc(1, sizeof(*context)); /* freed by rp_soft_close */
	if (!context)
		return NULL;
	context->sz = sizeof(*context);
	context->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->context.cmd_fd = -1;
	context->context.async_fd = -1;
	context->context.num_comp_vectors = 1;
	context->context.ops.post_send = ops->post_send;
	context->context.ops.post_recv = ops->post_recv;
	context->context.ops.post_srq_recv = ops->post_srq_recv;
	context->context.ops.poll_cq = ops->poll_cq;
	context->context.ops.req_notify_cq = ops->req_notify_cq;
	context->post_srq_ops = ops->post_srq_ops;
	return &context->context;
}

void rp_soft_close(struct ibv_context *context)
{
	if (context)
		free(verbs_get_ctx(context));
}

int rp_timer_open(void)
{
	return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
}

int rp_timer_set(int fd, int64_t ns)
{
	struct itimerspec when = {0};

	if (ns > 0) {
		when.it_value.tv_sec = ns / 1000000000;
		when.it_value.tv_nsec = ns % 1000000000;
	}
	return timerfd_settime(fd, 0, &when, NULL);
}
