/*
 * The C side of the soft device: a context whose operations are ours.
 *
 * The posting symbols follow qp->context->ops, so a context made here receives
 * exactly what a NIC's driver would.  Exported libibverbs functions must never
 * see it: they reach into a private part that it does not have.
 */
#include "soft_device.h"

#include <sys/timerfd.h>

/* ---- polling ------------------------------------------------------------ */

/* What is in the bytes of an entry, which is (bytes, work queue, how many slots it frees). */
struct entry {
	struct ibv_wc wc;
	struct ibv_wc_tm_info tm;
};

/* Take up to `most` completions, with tags where there is a `tm`; -1 where there is no such CQ. */
static int poll(uint32_t handle, int most, struct ibv_wc *wc, struct ibv_wc_tm_info *tm)
{
	PyGILState_STATE gil = PyGILState_Ensure();
	int nested = rp_soft_enter(), count = 0;
	PyObject *entries = rp_soft_part(handle, ENTRIES), *taken;
	Py_ssize_t there = entries ? PyObject_Size(entries) : 0;

	if (nested && there)
		there -= rp_journal_count(entries);
	/* Who is interrupted may never see what the poll returns: that stays for the next. */
	if (rp_soft_raises())
		there = 0;
	for (; count < most && count < there; count++) {
		const struct entry *entry;

		taken = PyObject_CallMethodObjArgs(entries, rp_names[POPLEFT], NULL);
		if (!taken)
			break;
		entry = (void *)PyBytes_AsString(PyTuple_GetItem(taken, 0));
		wc[count] = entry->wc;
		if (tm)
			tm[count] = entry->tm;
		rp_soft_settle(nested, PyTuple_GetItem(taken, 1), NULL,
			       (unsigned int)PyLong_AsUnsignedLong(PyTuple_GetItem(taken, 2)));
		Py_DECREF(taken);
	}
	PyErr_Clear();
	rp_soft_leave(nested);
	Py_XDECREF(entries);
	PyGILState_Release(gil);
	if (entries)
		return count;
	errno = EINVAL;
	return -1;
}

static int poll_cq(struct ibv_cq *cq, int num_entries, struct ibv_wc *wc)
{
	return poll(cq->handle, num_entries, wc, NULL);
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
	PyGILState_STATE gil = PyGILState_Ensure();
	int nested = rp_soft_enter(), code = EINVAL;
	PyObject *found = rp_soft_part(cq->handle, NAMES);

	if (found)
		code = rp_soft_settle(nested, found, NULL,
				      solicited_only ? RP_ARMED_SOLICITED : RP_ARMED_NEXT);
	rp_soft_leave(nested);
	Py_XDECREF(found);
	PyGILState_Release(gil);
	return code;
}

/* ---- a context ---------------------------------------------------------- */

int rp_soft_context_init(struct rp_soft_context *soft)
{
	struct verbs_context *context;

	if (!soft)
		return EINVAL;
	context = &soft->verbs;
	context->sz = sizeof(*context);
	context->context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	context->context.cmd_fd = -1;
	context->context.async_fd = -1;
	context->context.num_comp_vectors = 1;
	context->context.ops.post_send = rp_soft_post_send;
	context->context.ops.post_recv = rp_soft_post_recv;
	context->context.ops.post_srq_recv = rp_soft_post_srq_recv;
	context->context.ops.poll_cq = poll_cq;
	context->context.ops.req_notify_cq = req_notify_cq;
	context->post_srq_ops = rp_soft_post_srq_ops;
	return 0;
}

struct ibv_context *rp_soft_context_of(struct rp_soft_context *soft)
{
	return soft ? &soft->verbs.context : NULL;
}

/* ---- an extended CQ ----------------------------------------------------- */

static struct rp_soft_cq_ex *to_soft(struct ibv_cq_ex *cq)
{
	return (struct rp_soft_cq_ex *)(void *)cq;
}

static int next_poll(struct ibv_cq_ex *cq)
{
	struct rp_soft_cq_ex *soft = to_soft(cq);
	int n = poll(ibv_cq_ex_to_cq(cq)->handle, 1, &soft->wc, &soft->tm);

	if (n <= 0)
		return n ? EINVAL : ENOENT;
	cq->wr_id = soft->wc.wr_id;
	cq->status = soft->wc.status;
	return 0;
}

static int start_poll(struct ibv_cq_ex *cq, struct ibv_poll_cq_attr *attr)
{
	return attr && attr->comp_mask ? EINVAL : next_poll(cq);
}

static void end_poll(struct ibv_cq_ex *cq)
{
	(void)cq;
}

#define FIELDS(X)                                                                                \
	X(enum ibv_wc_opcode, opcode)                                                             \
	X(uint32_t, vendor_err)                                                                   \
	X(uint32_t, byte_len)                                                                     \
	X(__be32, imm_data)                                                                       \
	X(uint32_t, qp_num)                                                                       \
	X(uint32_t, src_qp)                                                                       \
	X(unsigned int, wc_flags)                                                                 \
	X(uint32_t, slid)                                                                         \
	X(uint8_t, sl)                                                                            \
	X(uint8_t, dlid_path_bits)
#define READ(type, field)                                                                         \
	static type read_##field(struct ibv_cq_ex *cq)                                            \
	{                                                                                         \
		return to_soft(cq)->wc.field;                                                     \
	}
#define SET(type, field) cq->cq.read_##field = read_##field;
FIELDS(READ)

static void read_tm_info(struct ibv_cq_ex *cq, struct ibv_wc_tm_info *tm_info)
{
	*tm_info = to_soft(cq)->tm;
}

int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq)
{
	if (!cq)
		return EINVAL;
	cq->cq.start_poll = start_poll;
	cq->cq.next_poll = next_poll;
	cq->cq.end_poll = end_poll;
	FIELDS(SET)
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
	struct itimerspec when = { .it_value = { ns / 1000000000, ns % 1000000000 } };

	return timerfd_settime(fd, 0, &when, NULL);
}
