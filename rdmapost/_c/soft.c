/*
 * The C side of the soft device: a context whose table of operations is ours.
 *
 * The posting symbols follow qp->context->ops, so a context made here receives
 * exactly what a NIC's driver would.  Exported libibverbs functions must never
 * see it: they reach into a private part that it does not have.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "soft.h"

#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* A context, and what it calls; `verbs` ends it, as the header expects. */
struct soft_context {
	struct rp_soft_ops ops;
	struct verbs_context verbs;
};

static struct soft_context *whole(struct ibv_context *context)
{
	char *verbs = (char *)verbs_get_ctx(context);

	return (void *)(verbs - offsetof(struct soft_context, verbs));
}

int rp_soft_interrupted;

/* To be called when a callback is over. */
static void deliver_interrupt(void)
{
	if (rp_soft_interrupted) {
		rp_soft_interrupted = 0;
		PyErr_SetInterrupt();
	}
}

/*
 * A provider in Python would follow the pointers of a chain one by one, and
 * each would cost more than all of this: so it gets the work requests as
 * records in one piece, as many at a time as the buffer holds.
 */
#define BUFFER_SIZE 8192

#define TAKE_CHAIN(type, take, number)                                         \
	do {                                                                   \
		_Alignas(8) char buffer[BUFFER_SIZE];                          \
		while (wr) {                                                   \
			type *first = wr;                                      \
			size_t size = 0;                                       \
			uint32_t count = 0;                                    \
			int64_t taken;                                         \
			for (int ok = 1; wr && ok; wr = wr->next) {            \
				size_t sges = 0;                               \
				ok = wr->num_sge >= 0 &&                       \
				     wr->num_sge <= RP_SOFT_MAX_SGE &&         \
				     (!wr->num_sge || wr->sg_list);            \
				if (ok)                                        \
					sges = (size_t)wr->num_sge *           \
					       sizeof(struct ibv_sge);         \
				if (size + sizeof(*wr) + sges > BUFFER_SIZE)   \
					break;                                 \
				memcpy(buffer + size, wr, sizeof(*wr));        \
				if (!ok)                                       \
					((type *)(void *)(buffer + size))      \
						->num_sge = -1;                \
				size += sizeof(*wr);                           \
				if (sges)                                      \
					memcpy(buffer + size, wr->sg_list,     \
					       sges);                          \
				size += sges;                                  \
				count++;                                       \
			}                                                      \
			taken = take(number, buffer, size, count);             \
			deliver_interrupt();                                   \
			if (taken == count)                                    \
				continue;                                      \
			for (uint32_t i = (uint32_t)taken; i; i--)             \
				first = first->next;                           \
			*bad_wr = first;                                       \
			return (int)(taken >> 32);                             \
		}                                                              \
		return 0;                                                      \
	} while (0)

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
		     struct ibv_send_wr **bad_wr)
{
	TAKE_CHAIN(struct ibv_send_wr, whole(qp->context)->ops.send, qp->qp_num);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
		     struct ibv_recv_wr **bad_wr)
{
	TAKE_CHAIN(struct ibv_recv_wr, whole(qp->context)->ops.recv, qp->qp_num);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad_wr)
{
	TAKE_CHAIN(struct ibv_recv_wr, whole(srq->context)->ops.srq_recv,
		   srq->handle);
}

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op,
			struct ibv_ops_wr **bad_op)
{
	int rc = whole(srq->context)->ops.post_srq_ops(srq, op, bad_op);

	deliver_interrupt();
	return rc;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	int n = whole(cq->context)->ops.poll_cq(cq, num_entries, wc);

	deliver_interrupt();
	return n;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	int rc = whole(cq->context)->ops.req_notify_cq(cq, solicited_only);

	deliver_interrupt();
	return rc;
}

struct ibv_context *rp_soft_open(const struct rp_soft_ops *ops)
{
	struct soft_context *soft;
	struct verbs_context *context;

	if (!ops) {
		errno = EINVAL;
		return NULL;
	}
	soft = calloc(1, sizeof(*soft)); /* freed by rp_soft_close */
	if (!soft)
		return NULL;
	soft->ops = *ops;
	context = &soft->verbs;
	context->sz = sizeof(*context);
	context->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->context.cmd_fd = -1;
	context->context.async_fd = -1;
	context->context.num_comp_vectors = 1;
	context->context.ops.post_send = post_send;
	context->context.ops.post_recv = post_recv;
	context->context.ops.post_srq_recv = post_srq_recv;
	context->context.ops.poll_cq = poll_cq;
	context->context.ops.req_notify_cq = req_notify_cq;
	context->post_srq_ops = post_srq_ops;
	return &context->context;
}

void rp_soft_close(struct ibv_context *context)
{
	if (context)
		free(whole(context));
}

/* ---- an extended CQ ----------------------------------------------------- */

static struct rp_soft_cq_ex *to_soft(struct ibv_cq_ex *cq)
{
	return (struct rp_soft_cq_ex *)(void *)cq;
}

/* Where the completion that was reached last stands in the buffer. */
static int at(struct ibv_cq_ex *cq)
{
	int next = to_soft(cq)->next;

	return next ? next - 1 : 0;
}

static const struct ibv_wc *current(struct ibv_cq_ex *cq)
{
	return &to_soft(cq)->wc[at(cq)];
}

static int next_poll(struct ibv_cq_ex *cq)
{
	struct rp_soft_cq_ex *soft = to_soft(cq);

	if (soft->next >= soft->count) {
		int n = soft->fill(ibv_cq_ex_to_cq(cq),
				   sizeof(soft->wc) / sizeof(soft->wc[0]),
				   soft->wc, soft->tm);

		deliver_interrupt();
		soft->next = soft->count = 0;
		if (n <= 0)
			return n ? EIO : ENOENT;
		soft->count = n;
	}
	soft->next++;
	cq->wr_id = current(cq)->wr_id;
	cq->status = current(cq)->status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	return attr && attr->comp_mask ? EINVAL : next_poll(cq);
}

static void end_poll(struct ibv_cq_ex *cq)
{
	/* What the buffer still holds is for the next batch. */
	(void)cq;
}

#define READ(type, field)                                                      \
	static type read_##field(struct ibv_cq_ex *cq)                         \
	{                                                                      \
		return current(cq)->field;                                     \
	}
READ(enum ibv_wc_opcode, opcode)
READ(uint32_t, vendor_err)
READ(uint32_t, byte_len)
READ(__be32, imm_data)
READ(uint32_t, qp_num)
READ(uint32_t, src_qp)
READ(unsigned int, wc_flags)
READ(uint32_t, slid)
READ(uint8_t, sl)
READ(uint8_t, dlid_path_bits)

static void read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm_info)
{
	*tm_info = to_soft(cq)->tm[at(cq)];
}

int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq, rp_soft_fill *fill)
{
	if (!cq || !fill)
		return EINVAL;
	cq->fill = fill;
	cq->cq.start_poll = start_poll;
	cq->cq.next_poll = next_poll;
	cq->cq.end_poll = end_poll;
	cq->cq.read_opcode = read_opcode;
	cq->cq.read_vendor_err = read_vendor_err;
	cq->cq.read_byte_len = read_byte_len;
	cq->cq.read_imm_data = read_imm_data;
	cq->cq.read_qp_num = read_qp_num;
	cq->cq.read_src_qp = read_src_qp;
	cq->cq.read_wc_flags = read_wc_flags;
	cq->cq.read_slid = read_slid;
	cq->cq.read_sl = read_sl;
	cq->cq.read_dlid_path_bits = read_dlid_path_bits;
	cq->cq.read_tm_info = read_tm_info;
	return 0;
}

/* ---- timers ------------------------------------------------------------- */

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
