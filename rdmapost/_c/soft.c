/*
 * The C side of the soft device: a context whose operations are ours.
 *
 * The posting symbols follow qp->context->ops, so a context made here receives
 * exactly what a NIC's driver would.  Exported libibverbs functions must never
 * see it: they reach into a private part that it does not have.
 *
 * A post is taken in here, whole; then Python carries it out.
 */
#include "soft_device.h"

#include <string.h>
#include <sys/timerfd.h>
#include <unistd.h>

/* ---- posting ------------------------------------------------------------ */

/* Where work requests go, all of it owned. */
struct target {
	PyObject *object; /* what the handle stands for */
	struct work_queue *queue;
	struct work_queue *slots; /* of a matching list, or NULL */
	PyObject *matching; /* the list, or NULL */
	PyObject *worker; /* what carries them out, borrowed; or NULL */
};

/* What ibv_send_wr, ibv_recv_wr and ibv_ops_wr have in common. */
struct any_wr {
	uint64_t wr_id;
	void *next;
};

enum posts { SENDS, RECEIVES, SRQ_RECEIVES, OPS };

/* Returns 0 or an errno; drop_target is to be called in any case. */
static int find_target(enum posts what, uint32_t handle, struct target *to)
{
	static const char *const names[] = { "sq", "rq", "queue", "ops" };

	to->object = rp_soft_object(handle);
	if (!to->object)
		return EINVAL;
	if (what == OPS) {
		to->matching = rp_soft_part(to->object, "tags", NULL);
		if (!to->matching)
			return EINVAL;
		to->slots = rp_soft_part(to->matching, "slots",
					 rp_work_queue_type);
		if (!to->slots)
			return EINVAL;
	}
	to->queue = rp_soft_part(to->matching ? to->matching : to->object,
				 names[what], rp_work_queue_type);
	if (what != SRQ_RECEIVES)
		to->worker = to->matching ? to->matching : to->object;
	return to->queue ? 0 : EINVAL;
}

static void drop_target(struct target *to)
{
	Py_XDECREF((PyObject *)to->queue);
	Py_XDECREF((PyObject *)to->slots);
	Py_XDECREF(to->matching);
	Py_XDECREF(to->object);
}

/* The errno with which a send is to fail on purpose, or 0. */
static int planned_failure(const struct work_queue *queue)
{
	PyObject *posts, *ask, *said = NULL;
	long code = 0;

	if (!queue->faults)
		return 0;
	posts = rp_soft_part(queue->faults, "posts", &PyDict_Type);
	if (posts && PyDict_Size(posts) > 0) {
		ask = rp_soft_part(queue->faults, "errno_of_post", NULL);
		said = ask ? rp_soft_step(ask) : NULL;
		Py_XDECREF(ask);
	}
	if (said)
		code = PyLong_AsLong(said);
	Py_XDECREF(said);
	Py_XDECREF(posts);
	PyErr_Clear();
	return (int)code;
}

/* Take one work request in; 0 or an errno. */
static int take_in(enum posts what, enum ibv_qp_type type, int nested,
		   const struct target *to, void *wr)
{
	struct work_queue *queue = to->queue;
	PyObject *wqe;
	int code = 0;

	/* The plan counts no post that is made in the middle of a verb. */
	if (what == SENDS && !nested)
		code = planned_failure(queue);
	if (!code)
		code = queue->refuses;
	if (!code && queue->used + queue->incoming >= queue->depth)
		code = ENOMEM;
	if (code)
		return code;
	if (what == SENDS)
		wqe = rp_read_send(queue, type, wr, &code);
	else if (what == OPS)
		wqe = rp_read_op(to->slots, wr, &code);
	else
		wqe = rp_read_recv(queue, wr, &code);
	if (!wqe)
		return code;
	code = rp_soft_accept(nested, queue,
			      what == OPS && ((struct ibv_ops_wr *)wr)->opcode ==
						     IBV_WR_TAG_ADD ?
				      to->slots : NULL,
			      wqe);
	Py_DECREF(wqe);
	return code;
}

/* Returns 0, or an errno and in *bad the first that is not taken. */
static int post(enum posts what, uint32_t handle, enum ibv_qp_type type,
		void *wr, void **bad)
{
	PyGILState_STATE gil = PyGILState_Ensure();
	int nested = rp_soft_enter(), code, any = 0;
	struct target to = { NULL, NULL, NULL, NULL, NULL };

	code = find_target(what, handle, &to);
	while (wr && !code) {
		code = take_in(what, type, nested, &to, wr);
		if (code)
			break;
		any = 1;
		wr = ((struct any_wr *)wr)->next;
	}
	if (any && to.worker && to.queue->prompt)
		rp_soft_start(nested, to.worker);
	rp_soft_leave(nested);
	drop_target(&to);
	PyGILState_Release(gil);
	if (code)
		*bad = wr;
	return code;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr,
		     struct ibv_send_wr **bad_wr)
{
	return post(SENDS, qp->handle, qp->qp_type, wr, (void **)bad_wr);
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr,
		     struct ibv_recv_wr **bad_wr)
{
	return post(RECEIVES, qp->handle, qp->qp_type, wr, (void **)bad_wr);
}

static int post_srq_recv(struct ibv_srq *srq, struct ibv_recv_wr *wr,
			 struct ibv_recv_wr **bad_wr)
{
	return post(SRQ_RECEIVES, srq->handle, 0, wr, (void **)bad_wr);
}

static int post_srq_ops(struct ibv_srq *srq, struct ibv_ops_wr *op,
			struct ibv_ops_wr **bad_op)
{
	return post(OPS, srq->handle, 0, op, (void **)bad_op);
}

/* ---- polling ------------------------------------------------------------ */

static struct completion_ring *find_ring(uint32_t handle)
{
	PyObject *found = rp_soft_object(handle);

	if (found && !PyObject_TypeCheck(found, rp_completion_ring_type))
		Py_CLEAR(found);
	return (struct completion_ring *)found;
}

/* Take up to `most` completions, with tags where there is a `tm`; -1 where there is no such CQ. */
static int poll(uint32_t handle, int most, struct ibv_wc *wc,
		struct ibv_wc_tm_info *tm)
{
	PyGILState_STATE gil = PyGILState_Ensure();
	int nested = rp_soft_enter(), count = 0;
	struct completion_ring *ring;
	struct cq_entry entry;

	ring = find_ring(handle);
	/* Who is interrupted may never see what the poll returns: that stays for the next. */
	if (rp_soft_raises())
		most = 0;
	while (ring && count < most && rp_ring_take(ring, &entry)) {
		wc[count] = entry.wc;
		if (tm)
			tm[count] = entry.tm;
		count++;
		rp_soft_free_slots(nested, entry.queue, entry.frees);
		Py_DECREF((PyObject *)entry.queue);
	}
	Py_XDECREF((PyObject *)ring);
	rp_soft_leave(nested);
	PyGILState_Release(gil);
	if (ring)
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
	int nested = rp_soft_enter();
	struct completion_ring *ring = find_ring(cq->handle);

	if (ring)
		rp_soft_arm(nested, ring, solicited_only ?
						  RP_ARMED_SOLICITED :
						  RP_ARMED_NEXT);
	rp_soft_leave(nested);
	Py_XDECREF((PyObject *)ring);
	PyGILState_Release(gil);
	return ring ? 0 : EINVAL;
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
	context->context.ops.post_send = post_send;
	context->context.ops.post_recv = post_recv;
	context->context.ops.post_srq_recv = post_srq_recv;
	context->context.ops.poll_cq = poll_cq;
	context->context.ops.req_notify_cq = req_notify_cq;
	context->post_srq_ops = post_srq_ops;
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

static const struct ibv_wc *current(struct ibv_cq_ex *cq)
{
	return &to_soft(cq)->wc;
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
	*tm_info = to_soft(cq)->tm;
}

int rp_soft_cq_ex_init(struct rp_soft_cq_ex *cq)
{
	if (!cq)
		return EINVAL;
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

int rp_timer_set(int fd, int64_t ns)
{
	struct itimerspec when = {0};

	if (ns > 0) {
		when.it_value.tv_sec = ns / 1000000000;
		when.it_value.tv_nsec = ns % 1000000000;
	}
	return timerfd_settime(fd, 0, &when, NULL);
}
