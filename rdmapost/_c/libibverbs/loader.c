/*
 * libibverbs, loaded at first use instead of linked.
 *
 * FUNCTIONS lists every exported function that we call: its result, name,
 * parameters, arguments, and the value returned if the library lacks it (with
 * errno set to EOPNOTSUPP). E marks functions that return an errno, V those that
 * return nothing. The list generates the table of pointers, and forwarders with
 * the functions' own names and hidden visibility, so that the header's inlines
 * and the generated binding link against them unchanged.
 *
 * dlsym gives the default version of each symbol; names that start with
 * IBVERBS_PRIVATE_ are never used.  The library stays open for the life of
 * the process: providers keep state in it.
 */
#include "libibverbs/shim.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* Header macros that hide exported functions. */
#undef ibv_query_port
#undef ibv_reg_mr
#undef ibv_reg_mr_iova

#define E(F, name, parameters, arguments) F(int, name, parameters, arguments, EOPNOTSUPP)
#define FUNCTIONS(F, V)                                                                           \
	F(struct ibv_device **, ibv_get_device_list, (int *n), (n), NULL)                         \
	F(const char *, ibv_get_device_name, (struct ibv_device *d), (d), NULL)                   \
	F(__be64, ibv_get_device_guid, (struct ibv_device *d), (d), 0)                            \
	F(struct ibv_context *, ibv_open_device, (struct ibv_device *d), (d), NULL)               \
	E(F, ibv_close_device, (struct ibv_context *c), (c))                                      \
	F(int, ibv_get_async_event, (struct ibv_context *c, struct ibv_async_event *e), (c, e),   \
	  -1)                                                                                     \
	E(F, ibv_query_device, (struct ibv_context *c, struct ibv_device_attr *a), (c, a))        \
	E(F, ibv_query_port, (struct ibv_context *c, uint8_t p, struct _compat_ibv_port_attr *a), \
	  (c, p, a))                                                                              \
	F(int, ibv_query_gid, (struct ibv_context *c, uint8_t p, int i, union ibv_gid *g),        \
	  (c, p, i, g), -1)                                                                       \
	E(F, _ibv_query_gid_ex,                                                                   \
	  (struct ibv_context *c, uint32_t p, uint32_t i,                                         \
	   struct ibv_gid_entry *e, uint32_t f, size_t s), (c, p, i, e, f, s))                    \
	F(ssize_t, _ibv_query_gid_table,                                                          \
	  (struct ibv_context *c, struct ibv_gid_entry *e, size_t m, uint32_t f, size_t s),       \
	  (c, e, m, f, s), -EOPNOTSUPP)                                                           \
	F(int, ibv_query_pkey, (struct ibv_context *c, uint8_t p, int i, __be16 *k), (c, p, i, k), \
	  -1)                                                                                     \
	F(struct ibv_pd *, ibv_alloc_pd, (struct ibv_context *c), (c), NULL)                      \
	E(F, ibv_dealloc_pd, (struct ibv_pd *pd), (pd))                                           \
	F(struct ibv_mr *, ibv_reg_mr, (struct ibv_pd *pd, void *a, size_t l, int f),             \
	  (pd, a, l, f), NULL)                                                                    \
	F(struct ibv_mr *, ibv_reg_mr_iova2,                                                      \
	  (struct ibv_pd *pd, void *a, size_t l, uint64_t i, unsigned int f), (pd, a, l, i, f),   \
	  NULL)                                                                                   \
	E(F, ibv_dereg_mr, (struct ibv_mr *mr), (mr))                                             \
	F(struct ibv_comp_channel *, ibv_create_comp_channel, (struct ibv_context *c), (c), NULL) \
	E(F, ibv_destroy_comp_channel, (struct ibv_comp_channel *ch), (ch))                       \
	F(struct ibv_cq *, ibv_create_cq,                                                         \
	  (struct ibv_context *c, int n, void *x, struct ibv_comp_channel *ch, int v),            \
	  (c, n, x, ch, v), NULL)                                                                 \
	E(F, ibv_destroy_cq, (struct ibv_cq *cq), (cq))                                           \
	F(int, ibv_get_cq_event, (struct ibv_comp_channel *ch, struct ibv_cq **cq, void **x),     \
	  (ch, cq, x), -1)                                                                        \
	F(struct ibv_srq *, ibv_create_srq, (struct ibv_pd *pd, struct ibv_srq_init_attr *a),     \
	  (pd, a), NULL)                                                                          \
	E(F, ibv_modify_srq, (struct ibv_srq *s, struct ibv_srq_attr *a, int m), (s, a, m))       \
	E(F, ibv_query_srq, (struct ibv_srq *s, struct ibv_srq_attr *a), (s, a))                  \
	E(F, ibv_destroy_srq, (struct ibv_srq *s), (s))                                           \
	F(struct ibv_qp *, ibv_create_qp, (struct ibv_pd *pd, struct ibv_qp_init_attr *a),        \
	  (pd, a), NULL)                                                                          \
	E(F, ibv_modify_qp, (struct ibv_qp *qp, struct ibv_qp_attr *a, int m), (qp, a, m))        \
	E(F, ibv_query_qp,                                                                        \
	  (struct ibv_qp *qp, struct ibv_qp_attr *a, int m, struct ibv_qp_init_attr *i),          \
	  (qp, a, m, i))                                                                          \
	E(F, ibv_destroy_qp, (struct ibv_qp *qp), (qp))                                           \
	F(struct ibv_ah *, ibv_create_ah, (struct ibv_pd *pd, struct ibv_ah_attr *a), (pd, a),    \
	  NULL)                                                                                   \
	E(F, ibv_destroy_ah, (struct ibv_ah *ah), (ah))                                           \
	E(F, ibv_attach_mcast, (struct ibv_qp *qp, const union ibv_gid *g, uint16_t l),           \
	  (qp, g, l))                                                                             \
	E(F, ibv_detach_mcast, (struct ibv_qp *qp, const union ibv_gid *g, uint16_t l),           \
	  (qp, g, l))                                                                             \
	V(ibv_free_device_list, (struct ibv_device **list), (list))                               \
	V(ibv_ack_async_event, (struct ibv_async_event *e), (e))                                  \
	V(ibv_ack_cq_events, (struct ibv_cq *cq, unsigned int n), (cq, n))

static struct {
#define POINTER(result, name, parameters, arguments, absent)                   \
	result(*name) parameters;
#define POINTER_VOID(name, parameters, arguments) void (*name) parameters;
	FUNCTIONS(POINTER, POINTER_VOID)
} table;

#define FORWARD(result, name, parameters, arguments, absent)                   \
	result name parameters                                                 \
	{                                                                      \
		if (!table.name) {                                             \
			errno = EOPNOTSUPP;                                    \
			return absent;                                         \
		}                                                              \
		return table.name arguments;                                   \
	}
#define FORWARD_VOID(name, parameters, arguments)                              \
	void name parameters                                                   \
	{                                                                      \
		if (table.name)                                                \
			table.name arguments;                                  \
	}
FUNCTIONS(FORWARD, FORWARD_VOID)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *library;

/* POSIX lets a data pointer hold a function's address; ISO C requires a copy through memory. */
static void find(const char *name, void *pointer)
{
	void *symbol = dlsym(library, name);

	memcpy(pointer, &symbol, sizeof(symbol));
}

static int open_library(const char *path, char *why, size_t size)
{
	library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		const char *text = dlerror();

		snprintf(why, size, "%s", text ? text : "dlopen failed");
		return -1;
	}
	if (!dlsym(library, "ibv_get_device_list")) {
		snprintf(why, size,
			 "%.400s is not libibverbs: it has no "
			 "ibv_get_device_list", path);
		dlclose(library);
		library = NULL;
		return -1;
	}
#define FIND(result, name, parameters, arguments, absent)                      \
	find(#name, &table.name);
#define FIND_VOID(name, parameters, arguments) find(#name, &table.name);
	FUNCTIONS(FIND, FIND_VOID)
	return 0;
}

int rp_load(const char *path, char *why, size_t size)
{
	int failed = 0;

	if (!path) {
		snprintf(why, size, "no library was named");
		return -1;
	}
	pthread_mutex_lock(&lock);
	if (!library)
		failed = open_library(path, why, size);
	pthread_mutex_unlock(&lock);
	return failed;
}

int rp_has_symbol(const char *name)
{
	return library && name && dlsym(library, name) != NULL;
}

struct ibv_mr *rp_reg_mr(struct ibv_pd *pd, void *addr, size_t length,
			 unsigned int access)
{
	if (!pd) {
		errno = EINVAL;
		return NULL;
	}
	if (!(access & IBV_ACCESS_OPTIONAL_RANGE))
		return ibv_reg_mr(pd, addr, length, (int)access);
	return ibv_reg_mr_iova2(pd, addr, length, (uintptr_t)addr, access);
}

struct ibv_cq *rp_create_cq(struct ibv_context *context, int cqe,
			    struct ibv_comp_channel *channel, int comp_vector)
{
	if (!context) {
		errno = EINVAL;
		return NULL;
	}
	return ibv_create_cq(context, cqe, NULL, channel, comp_vector);
}

struct ibv_cq *rp_create_cq_ex(struct ibv_context *context, int cqe,
			       struct ibv_comp_channel *channel,
			       int comp_vector)
{
	struct ibv_cq_init_attr_ex attr = {
		.cqe = (uint32_t)cqe,
		.channel = channel,
		.comp_vector = (uint32_t)comp_vector,
		.wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_IMM |
			    IBV_WC_EX_WITH_QP_NUM | IBV_WC_EX_WITH_SRC_QP |
			    IBV_WC_EX_WITH_SLID | IBV_WC_EX_WITH_SL |
			    IBV_WC_EX_WITH_DLID_PATH_BITS |
			    IBV_WC_EX_WITH_TM_INFO,
	};
	struct ibv_cq_ex *cq;

	if (!context) {
		errno = EINVAL;
		return NULL;
	}
	cq = ibv_create_cq_ex(context, &attr);
	return cq ? ibv_cq_ex_to_cq(cq) : NULL;
}

int rp_get_async_event(struct ibv_context *context,
		       struct ibv_async_event *event)
{
	int failed;

	if (!context || !event) {
		errno = EINVAL;
		return -1;
	}
	failed = ibv_get_async_event(context, event);
	/* Acknowledge at once: an object with an unacknowledged event cannot be destroyed. */
	if (!failed)
		ibv_ack_async_event(event);
	return failed;
}

int rp_query_port(struct ibv_context *context, uint8_t port_num,
		  struct ibv_port_attr *attr)
{
	if (!context || !attr)
		return EINVAL;
	return ___ibv_query_port(context, port_num, attr);
}

int rp_bind_mw(struct ibv_qp *qp, struct ibv_mw *mw, struct ibv_mw_bind *bind)
{
	/* Drivers dereference every pointer, even the region's in a bind of length 0. */
	if (!qp || !mw || !bind || !bind->bind_info.mr)
		return EINVAL;
	if (!mw->context || mw->context != qp->context ||
	    mw->context != bind->bind_info.mr->context)
		return EINVAL;
	if (!mw->context->ops.bind_mw)
		return EOPNOTSUPP;
	return ibv_bind_mw(qp, mw, bind);
}
