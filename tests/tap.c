/*
 * Stands in front of a context's posting calls: shows each chain to a test, as the
 * device is handed it, and refuses work requests as the test says.
 */
#include <errno.h>
#include <stdint.h>

#include <infiniband/verbs.h>

enum { SEND, RECV, SRQ_RECV, SRQ_OPS };

/* What becomes of a chain; all zero: the device has it. */
struct answer {
	int refuse; /* whether to refuse all behind the first `passed` */
	uint32_t passed; /* how many the device has */
	int rc; /* returned then: an errno, a negative one, or 0 */
	int bad; /* *bad then: NULL (0), left alone (1), the first refused (2), nowhere (3) */
};

typedef void see(int verb, const void *first, struct answer *answer);

static see *seen;
static struct ibv_context_ops device;
static int (*device_ops)(struct ibv_srq *srq, struct ibv_ops_wr *op,
			 struct ibv_ops_wr **bad);

void tap_open(struct ibv_context *context, see *with);
void tap_close(struct ibv_context *context);

#define STAND_IN(name, verb, queue, type, original)                           \
	static int name(struct queue *object, struct type *wr,                \
			struct type **bad)                                    \
	{                                                                     \
		struct answer answer = { 0 };                                 \
		struct type *last = NULL, *at = wr;                           \
		int rc = 0;                                                   \
		seen(verb, wr, &answer);                                      \
		if (!answer.refuse)                                           \
			return original(object, wr, bad);                     \
		for (uint32_t i = answer.passed; i && at; i--) {              \
			last = at;                                            \
			at = at->next;                                        \
		}                                                             \
		if (last) {                                                   \
			last->next = NULL;                                    \
			rc = original(object, wr, bad);                       \
			last->next = at;                                      \
		}                                                             \
		if (rc)                                                       \
			return rc;                                            \
		if (answer.bad != 1)                                          \
			*bad = answer.bad == 0 ? NULL : answer.bad == 2 ? at :\
			       (struct type *)(uintptr_t)0x10;                \
		return answer.rc;                                             \
	}

STAND_IN(post_send, SEND, ibv_qp, ibv_send_wr, device.post_send)
STAND_IN(post_recv, RECV, ibv_qp, ibv_recv_wr, device.post_recv)
STAND_IN(post_srq_recv, SRQ_RECV, ibv_srq, ibv_recv_wr, device.post_srq_recv)
STAND_IN(post_srq_ops, SRQ_OPS, ibv_srq, ibv_ops_wr, device_ops)

void tap_open(struct ibv_context *context, see *with)
{
	seen = with;
	device = context->ops;
	device_ops = verbs_get_ctx(context)->post_srq_ops;
	context->ops.post_send = post_send;
	context->ops.post_recv = post_recv;
	context->ops.post_srq_recv = post_srq_recv;
	verbs_get_ctx(context)->post_srq_ops = post_srq_ops;
}

void tap_close(struct ibv_context *context)
{
	context->ops.post_send = device.post_send;
	context->ops.post_recv = device.post_recv;
	context->ops.post_srq_recv = device.post_srq_recv;
	verbs_get_ctx(context)->post_srq_ops = device_ops;
}
